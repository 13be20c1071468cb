"""The engine's own process: `python -m llmq.runtime.engine_process INBOX OUTBOX`, the EngineConfig as JSON on stdin.

It steps while there is work and blocks while there is none, so that a busy step never stalls the HTTP process beside
it. It ends with its parent, whatever the parent dies of: stdin stays open as long as the parent lives.
"""

import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import zmq

from llmq.runtime.config import EngineConfig
from llmq.runtime.messages import (
    HEARTBEAT_S,
    Abort,
    AddRequests,
    Failed,
    FromEngine,
    Heartbeat,
    Outputs,
    Ready,
    Shutdown,
    ToEngine,
)
from llmq.runtime.parent_watch import die_with_parent
from llmq.runtime.request import EngineInfo, EngineRequest, EngineStats, RequestOutput


class EngineLike(Protocol):
    """What is asked of an engine."""

    info: EngineInfo

    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...
    def check(self) -> None: ...  # raises where it can go on no more
    def close(self) -> None: ...
    @property
    def has_unfinished_requests(self) -> bool: ...


class EngineLoop:
    """Reads what the parent says, steps, and sends what came of it."""

    def __init__(self, engine: EngineLike, inbox: zmq.Socket, send: Callable[[FromEngine], None]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._send = send
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode

    def run(self) -> None:
        """Until Shutdown. An exception of a step ends the process: what the engine holds can no longer be trusted."""
        while True:
            busy = self._engine.has_unfinished_requests
            if not busy and not self._inbox.poll(HEARTBEAT_S * 1000):
                self._engine.check()
                self._send(Heartbeat())
                continue
            answers: list[RequestOutput] = []
            while self._inbox.poll(0):
                message = self._decode(self._inbox.recv())
                if isinstance(message, Shutdown):
                    return
                answers += self._apply(message)
            answers += self._engine.step()
            self._send(Outputs(answers, self._engine.stats()))

    def _apply(self, message: AddRequests | Abort) -> list[RequestOutput]:
        if isinstance(message, Abort):
            return self._engine.abort(message.request_ids)
        refused = []
        for request in message.requests:
            try:
                self._engine.add_request(request)
            except Exception as error:  # one request's trouble is its own
                reason = str(error) or repr(error)
                refused += [
                    RequestOutput(request_id=name, finish_reason="error", error=reason) for name in request.names
                ]
        return refused


def main(make_engine: Callable[[EngineConfig], EngineLike] | None = None) -> int:
    """Serve one engine over zmq until the parent says Shutdown or is gone. Returns the exit code."""
    # The parent decides when to end: Ctrl-C and a service manager's SIGTERM reach the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    die_with_parent()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in zip((inbox, outbox), sys.argv[1:3], strict=True):
        socket.set_hwm(0)
        socket.connect(address)
    encode = msgspec.msgpack.Encoder().encode

    def send(message: FromEngine) -> None:
        outbox.send(encode(message))

    engine: EngineLike | None = None
    try:
        engine = (make_engine or _load_engine)(config)
        send(Ready(engine.info, engine.stats()))
        EngineLoop(engine, inbox, send).run()
        return 0
    except Exception as error:
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None:
            traceback.print_exc()
        reason = str(error) if exit_code is not None else f"{type(error).__name__}: {error}"
        send(Failed(reason, exit_code or 1))
        return exit_code or 1
    finally:
        if engine is not None:
            engine.close()
        context.destroy(linger=1000)


def _load_engine(config: EngineConfig) -> EngineLike:
    from llmq.runtime.engine import Engine

    return Engine.from_config(config)


if __name__ == "__main__":
    sys.exit(main())
