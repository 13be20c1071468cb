"""A server as a child: it answers, and nothing of it is left, however the block ends."""

import os
import subprocess
import time

import pytest

from llmq.cli import local_server
from llmq.cli.local_server import StreamedChat, serving
from llmq.profiles.errors import FailedError


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    processes = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr(local_server.subprocess, "Popen", Recorded)
    return processes


def asking(model: str, **sampling) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, **sampling}


def is_gone(session: int) -> bool:
    """Neither the server nor its engine is left. The engine may take a moment after its parent."""
    for _ in range(50):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_streamed_chat_and_then_nothing_left(tiny_llama, started):
    with serving(tiny_llama(), "--threads", "1") as url:
        chat = StreamedChat(url, asking(tiny_llama().name, max_tokens=12))
        pieces = list(chat)
    assert pieces
    assert 1 <= chat.timing.num_tokens <= 12
    assert 0 < chat.timing.ttft_s <= chat.timing.duration_s
    assert started[0].returncode == 0
    assert is_gone(started[0].pid)


def test_an_interruption_ends_the_server_and_its_engine(tiny_llama, started):
    def interrupted():
        with serving(tiny_llama(), "--threads", "1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert is_gone(started[0].pid)


def test_a_server_that_does_not_come_up_says_why(tmp_path):
    with pytest.raises(FailedError, match=r"ended before it was ready: .*config\.json"), serving(tmp_path):
        pass


def test_an_answer_that_is_no_success_is_an_error_with_the_server_s_words(tiny_llama, started):
    with serving(tiny_llama(), "--threads", "1") as url, pytest.raises(FailedError, match="404"):
        list(StreamedChat(url, asking("another", max_tokens=2)))
