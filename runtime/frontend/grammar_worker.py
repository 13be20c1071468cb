"""Follows grammars that callers wrote, each in a process of its own: `python -m … FD FOLDER VOCAB_SIZE EOS,EOS`.

What llguidance's limits do not bound is how it splits bytes among lexemes that may all take them: `start: /x+/ /x+/`
tries 2^n ways in a token of n x's, in one call that nothing can interrupt. So this process only holds the vocabulary
and forks: a grammar's own process has the vocabulary at once, and ends by the kernel's hand, alone, when one answer
takes more than CPU_LIMIT_S of computing or MEMORY_LIMIT more bytes.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection

import msgspec
from llguidance import LLMatcher

from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.grammar import GrammarCompiler, panics_raise, regex_grammar
from llmq.runtime.frontend.grammar_messages import Answer, Begin, Check, Question
from llmq.runtime.frontend.grammar_source import GrammarSourceError, grammar_of_source

CPU_LIMIT_S = 0.5
MEMORY_LIMIT = 256 * 2**20


class _Follower:
    """One process's grammar."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matcher: LLMatcher | None = None

    def answer(self, question: Question) -> Answer:
        try:
            with panics_raise(RuntimeError):
                if isinstance(question, Check):
                    grammar = grammar_of_source(question.source)
                    self._compiler.check(grammar, question.param)
                    return Answer(grammar=grammar)
                if isinstance(question, Begin):
                    self._matcher = self._compiler.matcher(question.grammar)
                self._matcher.consume_tokens(question.token_ids)
                mask = self._matcher.compute_bitmask()
                if self._matcher.is_error():
                    return Answer(error=self._matcher.get_error().splitlines()[0])
                return Answer(mask=mask)
        except InvalidRequestError as error:
            return Answer(error=error.message)
        except RecursionError:
            return Answer(error="nested too deeply")
        except (RuntimeError, GrammarSourceError) as error:
            return Answer(error=str(error))


def _follow(compiler: GrammarCompiler, connection: Connection) -> None:
    """Answer until nobody asks any more."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            most = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # Rust's last words when memory is out
    follower = _Follower(compiler)
    decode, encode = msgspec.msgpack.Decoder(Question).decode, msgspec.msgpack.Encoder().encode
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = decode(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
            answer = follower.answer(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(encode(answer))


def main() -> None:
    """Fork a follower for each connection that comes over the control socket, until that is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when to end, and closes the socket however it ends
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for followers
    control = socket.socket(fileno=int(sys.argv[1]))
    folder, vocab_size, eos = sys.argv[2:5]
    compiler = GrammarCompiler.from_folder(folder, int(vocab_size), [int(one) for one in eos.split(",") if one])
    compiler.matcher(regex_grammar("x+")).compute_bitmask()  # what the vocabulary makes when it is first needed
    control.send(b"r")  # ready
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            try:
                _follow(compiler, Connection(descriptors[0]))
            finally:
                os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
