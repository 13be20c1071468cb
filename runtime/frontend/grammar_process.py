"""Callers' own grammars from this side: asks the processes of `grammar_worker`, and waits only so long."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from multiprocessing.connection import Connection

import msgspec

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.grammar_messages import Answer, Check, Question

TOO_COSTLY = (
    "following it took too much time or memory; it may read one text in very many ways: let no two terminals that "
    "match the same characters stand side by side"
)
START_S = 60.0  # of the process that holds the vocabulary
CHECK_S = 10.0  # of a check: the machine may be busy, the check itself is limited by what it computes


class GrammarFaultError(Exception):
    """This grammar cannot be followed (further), in words for who wrote it."""


class Follower:
    """A process that follows one grammar, asked one thing at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, question: Question) -> None:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(question))
        except OSError:
            raise GrammarFaultError(TOO_COSTLY) from None

    def answer(self, deadline_s: float) -> Answer:
        """Waits until `deadline_s` (of time.monotonic) at most. Raises GrammarFaultError."""
        try:
            if not self._connection.poll(max(0.0, deadline_s - time.monotonic())):
                raise GrammarFaultError(TOO_COSTLY)
            answer = msgspec.msgpack.decode(self._connection.recv_bytes(), type=Answer)
        except (EOFError, OSError):  # the kernel ended it
            raise GrammarFaultError(TOO_COSTLY) from None
        if answer.error:
            raise GrammarFaultError(answer.error)
        return answer

    def close(self) -> None:
        """The process ends, at the latest when it has computed as long as it may."""
        self._connection.close()


class GrammarProcesses:
    """A process for each grammar; bound to one model's vocabulary, which the first use loads: it takes a second."""

    def __init__(self, folder: str | os.PathLike[str], vocab_size: int, eos_token_ids: Collection[int]) -> None:
        eos = ",".join(map(str, sorted(eos_token_ids)))
        self._arguments = [os.fspath(folder), str(vocab_size), eos]
        self._control: socket.socket | None = None
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def check(self, source: str, param: str) -> str:
        """The grammar that a caller wrote, as a follower takes it. Raises InvalidRequestError."""
        follower = self.connect()
        try:
            follower.ask(Check(source, param))
            return follower.answer(time.monotonic() + CHECK_S).grammar
        except GrammarFaultError as error:
            said = str(error)
            message = said if said.startswith(param) else f"{param} cannot be followed: {said}"
            raise InvalidRequestError(message, param=param) from None
        finally:
            follower.close()

    def connect(self) -> Follower:
        """A new process. Raises RuntimeError where none can be had."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for _ in range(2):  # the process that is forked may have been killed from outside: once more
                try:
                    self._start()
                    socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                    return Follower(Connection(ours.detach()))
                except OSError as error:
                    failure = error
                    self._end()
        ours.close()
        raise RuntimeError(f"the process for grammars does not start: {failure}")

    def close(self) -> None:
        """End what followers are forked from. Those that run end when nobody asks them."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llmq.runtime.frontend.grammar_worker", str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            )
        self._control.settimeout(START_S)
        if not self._control.recv(1):
            raise OSError(f"it ended with exit code {self._process.wait()}")

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
