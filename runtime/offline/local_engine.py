"""LocalEngine: an Engine of this very process behind the interface that the server's Generation knows."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from llmq.runtime.request import EngineInfo, EngineRequest, RequestOutput
from llmq.runtime.server.engine_client import EngineDeadError, OutputStream


class SteppedEngine(Protocol):
    """What is needed of `runtime.engine.Engine`, which this module does not import: it would bring torch."""

    info: EngineInfo

    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]: ...
    def step(self) -> list[RequestOutput]: ...
    @property
    def has_unfinished_requests(self) -> bool: ...


class LocalEngine:
    """Passes requests and outputs between an engine and streams. `run` steps it; the event loop stands meanwhile."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._streams: dict[str, OutputStream] = {}
        self._work = asyncio.Event()
        self._dead: EngineDeadError | None = None

    def open(self, timeout_s: float | None = None) -> OutputStream:
        return OutputStream(self, timeout_s)

    def trouble(self) -> str | None:
        return None if self._dead is None else f"the engine is dead: {self._dead}"

    def send_requests(self, requests: Sequence[EngineRequest], stream: OutputStream) -> None:
        """Raises EngineDeadError. What the engine refuses is an output with an error."""
        if self._dead is not None:
            raise self._dead
        for request in requests:
            names = request.names
            self._streams.update((name, stream) for name in names)
            try:
                self._engine.add_request(request)
            except ValueError as error:
                self._deliver(RequestOutput(request_id=name, finish_reason="error", error=str(error)) for name in names)
        self._work.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None]
        if known and self._dead is None:
            self._engine.abort(known)

    async def run(self) -> None:
        """Step while there is work, until cancelled. An engine that raises is dead, for all streams at once."""
        while True:
            await self._work.wait()
            if not self._engine.has_unfinished_requests:
                self._work.clear()
                continue
            try:
                self._deliver(self._engine.step())
            except Exception as error:
                self._dead = EngineDeadError(f"{type(error).__name__}: {error}", 1)
                for stream in set(self._streams.values()):
                    stream.put(self._dead)
                raise
            await asyncio.sleep(0)  # let those who wait for these outputs take them

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)
