"""The other ranks' processes as the first one sees them: started, told, watched, ended."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

import msgspec

from llmq.profiles.errors import FailedError, InputError
from llmq.runtime.config import EngineConfig
from llmq.runtime.parallel.messages import Failed, FromRank, LostPeer, Start, Stop, ToRank

STOP_S = 2.0  # that a rank has to end by itself, which it cannot in the middle of a step
REASON_S = 2.0  # until a rank that lost another is believed to be the first that knows
# As for the engine's own process: threads that spin while they wait cost others their core.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}

T = TypeVar("T", bound=FromRank)


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen
    connection: Connection


class RankProcesses:
    """Ranks 1 and up of an engine, a process each, which load their weights from the start on."""

    def __init__(self, config: EngineConfig) -> None:
        folder = tempfile.mkdtemp(prefix="llmq-ranks-")  # which only this user may enter
        self.meeting_point = Path(folder) / "ranks"
        self._ranks: list[_Rank] = []
        self._is_closing = threading.Event()
        # Also where nobody calls close: an engine that is dropped, or a program that ends.
        self.close = weakref.finalize(self, _end, self._ranks, folder, self._is_closing)
        for number in range(1, config.num_ranks):
            self._ranks.append(_start(number))
            _send(self._ranks[-1], msgspec.msgpack.encode(Start(config, number)))

    def send(self, message: ToRank) -> None:
        """To all. One that is gone is noticed by who waits for it."""
        encoded = msgspec.msgpack.encode(message)
        for rank in self._ranks:
            _send(rank, encoded)

    def expect(self, kind: type[T]) -> list[T]:
        """The next message of each. Raises InputError or FailedError with the words of a rank that ends instead."""
        found: dict[int, T] = {}
        while len(found) < len(self._ranks):
            awaited = {rank.connection: rank for rank in self._ranks if rank.number not in found}
            for connection in wait(list(awaited)):
                rank = awaited[connection]
                message = _receive(rank)
                if not isinstance(message, kind):
                    raise _error_of(rank, message)
                found[rank.number] = message
        return [found[rank.number] for rank in self._ranks]

    def watch(self, on_death: Callable[[Exception], None]) -> None:
        """From here on a rank that says anything has ended: call `on_death` with why, once, from another thread."""
        arguments = (list(self._ranks), self._is_closing, on_death)
        threading.Thread(target=_watch, args=arguments, daemon=True, name="rank-watch").start()


def _watch(ranks: list[_Rank], is_closing: threading.Event, on_death: Callable[[Exception], None]) -> None:
    living = {rank.connection: rank for rank in ranks}
    echo, deadline_s = None, None
    while living:
        ready = wait(list(living), None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        if is_closing.is_set():
            return
        for connection in ready:
            rank = living.pop(connection)
            message = _receive(rank)
            if not isinstance(message, LostPeer):
                on_death(_error_of(rank, message))
                return
            echo = echo or _error_of(rank, message)
            deadline_s = deadline_s or time.monotonic() + REASON_S
        if not ready:
            break
    on_death(echo)


def _send(rank: _Rank, encoded: bytes) -> None:
    with contextlib.suppress(OSError):
        rank.connection.send_bytes(encoded)


def _receive(rank: _Rank) -> FromRank | None:
    """None: it ended without a word."""
    try:
        return msgspec.msgpack.decode(rank.connection.recv_bytes(), type=FromRank)
    except (EOFError, OSError):
        return None


def _error_of(rank: _Rank, message: FromRank | None) -> Exception:
    """Why a rank has ended that said `message` last."""
    if isinstance(message, Failed):
        return (InputError if message.exit_code == 2 else FailedError)(f"rank {rank.number}: {message.reason}")
    if isinstance(message, LostPeer):
        return FailedError(f"rank {rank.number}: {message.reason}")
    with contextlib.suppress(subprocess.TimeoutExpired):
        rank.process.wait(STOP_S)
    code = rank.process.returncode
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return FailedError(f"the process of rank {rank.number} (pid {rank.process.pid}) ended by {how}")


def _start(number: int) -> _Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmq.runtime.parallel.rank_process", str(theirs.fileno())],
            stdin=subprocess.PIPE,  # open as long as this process lives
            stdout=2,  # results only go to stdout, and a rank has none
            pass_fds=[theirs.fileno()],
            env=_ENVIRONMENT | os.environ,
        )
    return _Rank(number, process, Connection(ours.detach()))


def _end(ranks: list[_Rank], folder: str, is_closing: threading.Event) -> None:
    is_closing.set()
    for rank in ranks:
        _send(rank, msgspec.msgpack.encode(Stop()))
    deadline_s = time.monotonic() + STOP_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
        rank.process.stdin.close()
        rank.connection.close()
    shutil.rmtree(folder, ignore_errors=True)
