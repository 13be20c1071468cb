"""A conversation turn by turn, then the program: piped, at a URL, in a terminal."""

import codecs
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from llmq.cli.chat import Conversation, app
from llmq.cli.local_server import ChatTiming, serving
from llmq.profiles.errors import FailedError, InputError


class ScriptedAnswer:
    """What StreamedChat is to a conversation."""

    finish_reason = "length"
    timing = ChatTiming(num_tokens=3, ttft_s=0.25, duration_s=0.45)

    def __init__(self, *pieces) -> None:
        self._pieces = pieces
        self.closed = False

    def __iter__(self):
        try:
            for piece in self._pieces:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.closed = True


def conversation(*answers: ScriptedAnswer, system=None, interactive=True):
    """(a Conversation, what each answer was asked with)."""
    asked, turns = [], iter(answers)

    def ask(messages):
        asked.append(messages)
        return next(turns)

    return Conversation(ask, system, interactive=interactive), asked


def roles(messages) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in messages]


def test_turns_are_remembered_and_reset():
    talk, asked = conversation(ScriptedAnswer("Hel", "lo"), ScriptedAnswer("B"), ScriptedAnswer("C"), system="Be kind")
    assert talk.take("hi")
    assert talk.take("more")
    assert roles(asked[1]) == [("system", "Be kind"), ("user", "hi"), ("assistant", "Hello"), ("user", "more")]
    assert talk.take("/reset")
    assert talk.take("again")
    assert roles(asked[2]) == [("system", "Be kind"), ("user", "again")]
    assert not talk.take("/exit")


def test_the_role_can_be_changed_and_taken_away():
    talk, asked = conversation(ScriptedAnswer("A"), ScriptedAnswer("B"))
    talk.take("/system You are  a pirate")
    talk.take("hi")
    assert roles(asked[0]) == [("system", "You are  a pirate"), ("user", "hi")]
    talk.take("/system")
    talk.take("hi")
    assert roles(asked[1]) == [("user", "hi")]


def test_an_interrupted_answer_stays_as_far_as_it_came(capsys):
    answer = ScriptedAnswer("half", KeyboardInterrupt())
    talk, asked = conversation(answer, ScriptedAnswer("B"))
    assert talk.take("hi")
    assert answer.closed
    assert "(stopped)" in capsys.readouterr().err
    talk.take("go on")
    assert roles(asked[1]) == [("user", "hi"), ("assistant", "half"), ("user", "go on")]


def test_a_failed_answer_leaves_no_trace(capsys):
    talk, asked = conversation(ScriptedAnswer("x", FailedError("too long")), ScriptedAnswer("B"))
    assert talk.take("hi")
    assert "too long" in capsys.readouterr().err
    talk.take("shorter")
    assert roles(asked[1]) == [("user", "shorter")]


def test_a_terminal_is_told_the_pace_and_protected(capsys):
    talk, _ = conversation(ScriptedAnswer("a\x1b[2Jb\n", "\x9bc"))
    talk.take("hi")
    shown = capsys.readouterr()
    assert shown.out == "a[2Jb\nc\n"
    assert "(3 tokens · TTFT 250 ms · 10.0 tokens/s · cut: no more tokens fit or were allowed)" in shown.err


def test_a_wrong_command_is_told_and_in_a_pipe_an_error(capsys):
    assert conversation()[0].take("/rest")
    assert "no command /rest" in capsys.readouterr().err
    with pytest.raises(FailedError, match="no command /rest"):
        conversation(interactive=False)[0].take("/rest")


def test_piped_answers_are_all_that_comes_out(capsys):
    talk, _ = conversation(ScriptedAnswer("a\x1bb"), interactive=False)
    talk.take("hi")
    talk.take("  ")
    shown = capsys.readouterr()
    assert shown.out == "a\x1bb\n"
    assert shown.err == ""


@pytest.fixture(scope="module")
def server(tiny_llama):
    with serving(tiny_llama(max_position_embeddings=4096), "--threads", "1", "--api-key", "sesame") as url:
        yield url


def chat(url: str, *options: str, text: str = "", key: str = "sesame") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "llmq", "chat", url, *options],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"LLMQ_API_KEY": key},
    )


def test_at_a_url_through_a_pipe(server):
    greedy = ("--temperature", "0", "--max-tokens", "5")
    once = chat(server, *greedy, text="hi\n")
    assert once.returncode == 0, once.stderr
    assert once.stderr == ""
    assert len(once.stdout) > 1
    reset = chat(server + "/v1", *greedy, text="hi\n/reset\nhi\n/exit\nnever asked\n")
    assert reset.stdout == 2 * once.stdout


def test_what_is_wrong_with_a_url_is_said(server):
    for done, words in (
        (chat(server, key="wrong"), "--api-key"),
        (chat("http://127.0.0.1:9"), "nothing answers"),
        (chat("http://[oops"), "nothing answers"),
        (chat(server, "--model", "gpt"), "has no model 'gpt'"),
    ):
        assert done.returncode == 2, done
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_refusal_of_the_server_is_an_exit_code(server):
    done = chat(server, text="x" * 40_000)
    assert done.returncode == 1
    assert "the server answered 400" in done.stderr


@pytest.mark.parametrize("flag", [["--threads", "1"], ["--kv-dtype", "int8"]], ids=" ".join)
def test_what_a_server_decides_itself_cannot_be_asked_of_a_url(flag):
    with pytest.raises(InputError, match=f"{flag[0]} is of a model served here"):
        CliRunner().invoke(app, ["http://127.0.0.1:9", *flag], catch_exceptions=False)


def test_a_model_of_a_server_is_not_asked_of_what_is_served_here():
    with pytest.raises(InputError, match=r"--model foo is one of a server's models.*llmq chat foo"):
        CliRunner().invoke(app, ["--model", "foo"], catch_exceptions=False)


def test_a_model_is_served_for_the_time_being(tiny_llama, monkeypatch):
    monkeypatch.delenv("LLMQ_API_KEY", raising=False)
    options = ["--threads", "1", "--max-tokens", "4", "--seed", "1"]
    done = CliRunner().invoke(app, [str(tiny_llama()), *options], input="hi\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip("\n") or done.stdout == "\n\n"


class Terminal:
    """`llmq chat` on a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._controller, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmq", "chat", *args],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env=os.environ | {"LLMQ_API_KEY": "sesame", "TERM": "dumb"},
        )
        os.close(terminal)
        self.shown = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        while True:
            try:
                self.shown += decoder.decode(os.read(self._controller, 4096))
            except OSError:
                return

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.shown!r}"
            time.sleep(0.02)
        self.shown = self.shown[re.search(pattern, self.shown).end() :]  # what comes next is looked for behind it


@pytest.fixture
def endless():
    """A server whose answers never end; it notes that a client has left."""
    left = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(b'{"data": [{"id": "endless"}]}')

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            event = {"choices": [{"delta": {"content": "word "}, "finish_reason": None}]}
            try:
                self._send(b"")
                while True:
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                    time.sleep(0.02)
            except OSError:
                left.set()

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.left = left
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_in_a_terminal_ctrl_c_stops_an_answer_and_leaves_the_server(endless):
    terminal = Terminal(f"http://127.0.0.1:{endless.server_port}")
    try:
        terminal.wait_for("> ")
        terminal.type("tell me everything\n")
        terminal.wait_for("word word word")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(r"\(stopped\)")
        assert endless.left.wait(10)
        terminal.wait_for("> ")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("Ctrl-D or /exit")
        terminal.type("/exit\n")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.process.kill()


def test_in_a_terminal_the_pace_is_shown(server):
    terminal = Terminal(server, "--max-tokens", "6", "--seed", "3")
    try:
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for(r"\(\d tokens? · TTFT \d+ ms")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.process.kill()
