"""EngineClient: the engine's process as the HTTP process sees it. Imports no torch."""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import msgspec
import zmq
import zmq.asyncio

from llmq.profiles.units import format_count
from llmq.runtime.config import EngineConfig
from llmq.runtime.messages import Abort, AddRequests, Failed, FromEngine, Outputs, Ready, Shutdown
from llmq.runtime.request import EngineInfo, EngineRequest, EngineStats, RequestOutput

ENGINE_COMMAND = (sys.executable, "-m", "llmq.runtime.engine_process")
# OpenMP's threads spin while they wait for each other, which on a machine with anything else to do, this process
# included, costs most of the time: 3 against 24 tokens/s measured on two busy cores (not measured on idle ones).
_ENGINE_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
# No message for this long: the engine stands still. A step may be long on a slow machine, so the limit grows with the
# longest one seen.
STALL_IDLE_S = 10.0
STALL_BUSY_S = 60.0
STALL_STEPS = 5.0
SHUTDOWN_S = 5.0


class EngineDeadError(Exception):
    """The engine's process is gone; `exit_code` is what the server should end with."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class CutOffError(Exception):
    """The server ends and could not wait for this request any longer."""


class TimedOutError(Exception):
    """The requests of a stream did not finish in the time that they had."""


class OutputStream:
    """The outputs of some requests and their forks, until each has finished. `close` aborts what has not."""

    def __init__(self, client: "EngineClient", timeout_s: float | None = None) -> None:
        self._client = client
        # One reads and many put: an asyncio.Queue, which serves many readers, costs as much as making the text.
        self._arrived: deque[RequestOutput | EngineDeadError | CutOffError | TimedOutError] = deque()
        self._reader: asyncio.Future[None] | None = None  # that waits for something to arrive
        self._unfinished: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Raises EngineDeadError."""
        self._client.send_requests(requests, self)
        self._unfinished.update(name for request in requests for name in request.names)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End some; nothing more comes of them."""
        aborted = self._unfinished.intersection(request_ids)
        self._unfinished -= aborted
        self._client.abort(aborted)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.abort(list(self._unfinished))

    def _time_out(self) -> None:
        # The engine's blocks are free at once, even where nobody reads what has come so far.
        self._client.abort(self._unfinished)
        self.put(TimedOutError())

    def put(self, output: RequestOutput | EngineDeadError | CutOffError | TimedOutError) -> None:
        self._arrived.append(output)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Raises EngineDeadError when the engine dies, CutOffError when the server can wait no longer, TimedOutError
        when the time is up."""
        loop = asyncio.get_running_loop()
        while self._unfinished:
            if not self._arrived:
                self._reader = loop.create_future()
                await self._reader
            output = self._arrived.popleft()
            if isinstance(output, Exception):
                self._unfinished.clear()
                raise output
            if output.request_id in self._unfinished:
                if output.finish_reason is not None:
                    self._unfinished.remove(output.request_id)
                yield output


class EngineClient:
    """Starts the engine's process, passes requests and outputs, and notices when it dies or stands still."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        on_stats: Callable[[EngineStats], None] = lambda stats: None,
        stall_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An engine that has stood still for `stall_timeout_s`, from when `trouble` says so, is dead; None: never."""
        self._config = config
        self._stall_timeout_s = stall_timeout_s
        self._command = command
        self._on_stats = on_stats
        self._clock = clock
        self._streams: dict[str, OutputStream] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._last_message_s = clock()
        self._longest_step_s = 0.0
        self._dead: EngineDeadError | None = None
        self._stopping = False
        self.died = asyncio.Event()
        self._tasks: list[asyncio.Task] = []
        self._process: asyncio.subprocess.Process | None = None
        # Only this user may enter the folder, so nobody else can speak to the engine.
        self._folder = tempfile.mkdtemp(prefix="llmq-")
        self._context = zmq.asyncio.Context()

    async def start(self) -> EngineInfo:
        """Until the model is loaded. Raises EngineDeadError with the engine's own words when it cannot be."""
        self._outbox, self._inbox = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        addresses = [f"ipc://{self._folder}/requests", f"ipc://{self._folder}/outputs"]
        for socket, address in zip((self._outbox, self._inbox), addresses, strict=True):
            socket.set_hwm(0)
            socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *addresses,
            stdin=asyncio.subprocess.PIPE,
            stdout=2,  # results only go to stdout, and an engine has none
            env=_ENGINE_ENVIRONMENT | os.environ,
        )
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._receive(ready)),
            asyncio.create_task(self._watch_process(ready)),
        ]
        info = await ready
        if self._stall_timeout_s is not None:
            self._tasks.append(asyncio.create_task(self._watch_progress(self._stall_timeout_s, ready)))
        return info

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    @property
    def exit_code(self) -> int:
        """What the server should end with: 0 unless the engine died."""
        return 0 if self._dead is None else self._dead.exit_code or 1

    def open(self, timeout_s: float | None = None) -> OutputStream:
        """A stream for requests that may take `timeout_s` from now on."""
        return OutputStream(self, timeout_s)

    def send_requests(self, requests: Sequence[EngineRequest], stream: OutputStream) -> None:
        if self._dead is not None:
            raise self._dead
        if not self._streams:
            self._last_message_s = self._clock()  # work begins now: the age of idle silence does not count
        self._streams.update((name, stream) for request in requests for name in request.names)
        self._send(AddRequests(list(requests)))

    def abort(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None]
        if known and self._dead is None:
            self._send(Abort(known))

    def cut_off(self) -> None:
        """End all that runs: a shutdown's patience is over."""
        for stream in set(self._streams.values()):
            stream.put(CutOffError())
        self.abort(list(self._streams))

    def trouble(self) -> str | None:
        """Why the engine makes no progress; None while it does."""
        if self._dead is not None:
            return f"the engine is dead: {self._dead}"
        age_s = self._clock() - self._last_message_s
        busy = bool(self._streams)
        limit_s = max(STALL_BUSY_S, STALL_STEPS * self._longest_step_s) if busy else STALL_IDLE_S
        if age_s <= limit_s:
            return None
        return f"no step for {age_s:.1f} s, {format_count(len(self._streams), 'request')} waiting for one"

    async def stop(self, *, kill: bool = False) -> None:
        """End the process, politely unless `kill` or it is known not to listen, and remove what was made for it."""
        kill = kill or self._dead is not None
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None and not kill:
            self._send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), SHUTDOWN_S)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: AddRequests | Abort | Shutdown) -> None:
        # Without a high-water mark a send never waits; the future is done when it returns.
        self._outbox.send(self._encode(message))

    async def _receive(self, ready: "asyncio.Future[EngineInfo]") -> None:
        decode = msgspec.msgpack.Decoder(FromEngine).decode
        while True:
            message = decode(await self._inbox.recv())
            self._note_progress()
            if isinstance(message, Ready):
                self._on_stats(message.stats)
                ready.set_result(message.info)
            elif isinstance(message, Outputs):
                self._on_stats(message.stats)
                self._deliver(message.outputs)
            elif isinstance(message, Failed):
                self._die(message.reason, message.exit_code, ready)
            await asyncio.sleep(0)  # a receive that need not wait does not let the others run

    def _note_progress(self) -> None:
        now = self._clock()
        if self._streams:
            self._longest_step_s = max(self._longest_step_s, now - self._last_message_s)
        self._last_message_s = now

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted here while the step ran there
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)

    async def _watch_process(self, ready: "asyncio.Future[EngineInfo]") -> None:
        code = await self._process.wait()
        if self._stopping:
            return
        await asyncio.sleep(0.2)  # its last words may still be on their way
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._die(f"the engine's process (pid {self._process.pid}) ended by {how}", max(code, 1), ready)

    async def _watch_progress(self, timeout_s: float, ready: "asyncio.Future[EngineInfo]") -> None:
        standing_since_s = None
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            if (trouble := self.trouble()) is None:
                standing_since_s = None
            elif standing_since_s is None:
                standing_since_s = self._clock()
            elif self._clock() - standing_since_s >= timeout_s:
                self._die(f"it stands still: {trouble}", 1, ready)
                return

    def _die(self, reason: str, exit_code: int, ready: "asyncio.Future[EngineInfo]") -> None:
        if self._dead is not None:
            return
        self._dead = EngineDeadError(reason, exit_code)
        for stream in set(self._streams.values()):
            stream.put(self._dead)
        self._streams.clear()
        self.died.set()
        if not ready.done():
            ready.set_exception(self._dead)
