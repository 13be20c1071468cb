"""Runs many requests through one Engine in this process, a bounded number of them at a time."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from llmq.profiles.errors import FailedError
from llmq.runtime.request import EngineInfo, EngineRequest, RequestOutput

MAX_IN_FLIGHT = 128  # some wait, so that a step is full although some of them wait for a prefix that it computes


class EngineLike(Protocol):
    """What evals needs of `runtime.engine.Engine`; tests run the same code over a toy distribution."""

    info: EngineInfo

    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_ids: Iterable[str]) -> None: ...
    def step(self) -> list[RequestOutput]: ...


class RequestStream:
    """Iterates over the outputs of `requests`, which are added first come first served as earlier ones finish.

    Whatever ends the iteration (the last output, an error, Ctrl-C) leaves none of them in the engine.
    Raises FailedError when the engine reports that a request failed.
    """

    def __init__(self, engine: EngineLike, requests: Iterable[EngineRequest], max_in_flight: int = MAX_IN_FLIGHT):
        self._engine = engine
        self._requests = iter(requests)
        self._max_in_flight = max_in_flight
        self._in_flight: set[str] = set()

    def abort(self, request_id: str) -> None:
        """Ends a request early, for instance at a stop string. Further outputs of it are not shown."""
        self._in_flight.discard(request_id)
        self._engine.abort([request_id])

    def __iter__(self) -> Iterator[RequestOutput]:
        try:
            while self._fill():
                for output in self._engine.step():
                    if output.request_id not in self._in_flight:
                        continue
                    if output.finish_reason == "error":
                        raise FailedError(f"request {output.request_id} failed in the engine: {output.error}")
                    if output.finish_reason is not None:
                        self._in_flight.discard(output.request_id)
                    yield output
        finally:
            if self._in_flight:
                self._engine.abort(sorted(self._in_flight))
                self._in_flight.clear()

    def _fill(self) -> bool:
        while len(self._in_flight) < self._max_in_flight:
            request = next(self._requests, None)
            if request is None:
                break
            self._in_flight.add(request.request_id)
            self._engine.add_request(request)
        return bool(self._in_flight)
