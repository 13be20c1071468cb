"""QueueClock: how long each request waited before its first token was scheduled."""

import time
from collections.abc import Callable, Iterable

import msgspec

from llmq.runtime.request import EngineRequest, RequestOutput


class QueueClock:
    """Told when a request arrives, is first scheduled, and brings something. What it says decides nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrivals_s: dict[str, float] = {}  # of who waits
        self._waits_s: dict[str, float] = {}  # of who has brought nothing yet

    def arrive(self, request: EngineRequest) -> None:
        self._arrivals_s[request.request_id] = self._clock()

    def schedule(self, request_ids: Iterable[str]) -> None:
        """Also those of requests that come back after a preemption: only the first time counts."""
        now = self._clock()
        for request_id in request_ids:
            if (arrival_s := self._arrivals_s.pop(request_id, None)) is not None:
                self._waits_s[request_id] = now - arrival_s

    def stamp(self, output: RequestOutput) -> RequestOutput:
        """The output with `queue_s`, where it is a request's first."""
        waited_s = self._waits_s.pop(output.request_id, None)
        return output if waited_s is None else msgspec.structs.replace(output, queue_s=waited_s)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._arrivals_s.pop(request_id, None)
            self._waits_s.pop(request_id, None)
