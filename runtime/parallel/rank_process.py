"""The process of a rank that is not the first: `python -m llmq.runtime.parallel.rank_process FD`.

It does what it is told over the socket FD, and ends with its parent, whatever the parent dies of.
"""

import contextlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llmq.runtime.config import EngineConfig
from llmq.runtime.parallel.messages import (
    Allocate,
    Allocated,
    Failed,
    FromRank,
    LostPeer,
    Meet,
    Profile,
    Profiled,
    Start,
    Step,
    Stop,
    ToRank,
)
from llmq.runtime.parent_watch import die_with_parent
from llmq.runtime.scheduler_output import DraftPass

if TYPE_CHECKING:
    from llmq.runtime.model_runner import ModelRunner
    from llmq.runtime.parallel.rank import Rank


class RankProcess:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._decode = msgspec.msgpack.Decoder(ToRank).decode

    def run(self) -> None:
        """Until Stop, or the parent is gone."""
        from llmq.runtime.parallel.rank import Rank

        start: Start = self._receive()
        rank = Rank.of(start.config, start.rank)
        try:
            self._follow(start.config, rank)
        finally:
            rank.close()

    def _follow(self, config: EngineConfig, rank: "Rank") -> None:
        from llmq.runtime.worker import Worker

        worker = Worker(config, rank)
        worker.load()
        self.send(worker.loaded)
        runner: ModelRunner | None = None
        while not isinstance(message := self._receive(), Stop):
            match message:
                case Meet(meeting_point):
                    rank.connect(Path(meeting_point), worker.device)
                case Profile():
                    self.send(Profiled(worker.profile()))
                case Allocate(num_blocks):
                    runner = worker.make_runner(num_blocks)
                    self.send(Allocated())
                case Step(plan):
                    runner.execute(plan)
                case DraftPass():
                    runner.follow(message)

    def send(self, message: FromRank) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message))

    def _receive(self) -> ToRank:
        try:
            return self._decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            return Stop()


def main() -> int:
    # The first rank decides when to end: Ctrl-C and a service manager's SIGTERM reach the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    process = RankProcess(Connection(int(sys.argv[1])))
    try:
        process.run()
        return 0
    except Exception as error:
        words = _last_words(error)
        with contextlib.suppress(OSError):  # the first rank is gone
            process.send(words)
        return words.exit_code if isinstance(words, Failed) else 1


def _last_words(error: Exception) -> Failed | LostPeer:
    from llmq.runtime.parallel.collectives import LostPeerError

    if isinstance(error, LostPeerError):
        return LostPeer(str(error))
    if (exit_code := getattr(error, "exit_code", None)) is not None:
        return Failed(str(error), exit_code)
    traceback.print_exc()
    return Failed(f"{type(error).__name__}: {error}", 1)


if __name__ == "__main__":
    sys.exit(main())
