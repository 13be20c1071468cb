"""`llmq serve` as a child of this process: started, talked to, and never left behind."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.profiles.errors import FailedError

if TYPE_CHECKING:
    import httpx

_READY = re.compile(r"llmq serve: (http://\S+)/v1\b")
_END_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 600.0  # without a byte


@contextlib.contextmanager
def serving(folder: Path, *options: str, timeout_s: float = 120.0) -> Iterator[str]:
    """The base URL of a server of `folder` on a free loopback port; it has ended when the block has.

    Raises FailedError with the server's last words when it does not come up.
    """
    command = [sys.executable, "-m", "llmq", "serve", str(folder), "--port", "0", *options]
    # In a session of its own: Ctrl-C reaches this process alone, which then ends the server in order.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield _wait_until_ready(process, timeout_s)
    finally:
        _end(process)


def _wait_until_ready(process: subprocess.Popen, timeout_s: float) -> str:
    lines: list[str] = []
    url: list[str] = []
    known = threading.Event()  # that it is ready, or has ended

    def read() -> None:
        for line in process.stderr:
            lines.append(line.rstrip())
            if match := _READY.match(line):
                url.append(match[1])
                known.set()
        known.set()

    threading.Thread(target=read, daemon=True).start()
    if not known.wait(timeout_s):
        raise FailedError(f"the server was not ready after {timeout_s:.0f} s: {' / '.join(lines[-3:])}")
    if not url:
        raise FailedError(f"the server ended before it was ready: {' / '.join(lines[-3:])}")
    return url[0]


def _end(process: subprocess.Popen) -> None:
    """SIGTERM, and what is stronger when it is not heard."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # a second SIGTERM ends a drain at once
        if process.poll() is not None:
            break
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)


@dataclass(frozen=True)
class ChatTiming:
    """One streamed answer as its client saw it."""

    num_tokens: int
    ttft_s: float  # to the first text
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        """After the first token: the pace of decoding."""
        return (self.num_tokens - 1) / max(self.duration_s - self.ttft_s, 1e-9)


class StreamedChat:
    """One chat completion over HTTP. Iterate for its text as it comes; then `timing` and `finish_reason` are there.

    Leaving the iteration early closes the connection, which ends the answer at the server too.
    """

    def __init__(self, base_url: str, body: dict[str, Any], *, api_key: str | None = None) -> None:
        """`body`: model, messages, and how to sample. It is sent as a stream with usage."""
        self._url = f"{base_url}/v1/chat/completions"
        self._body = body | {"stream": True, "stream_options": {"include_usage": True}}
        self._headers = authorization(api_key)
        self.timing: ChatTiming | None = None
        self.finish_reason: str | None = None

    def __iter__(self) -> Iterator[str]:
        """Raises FailedError in the server's words where it refuses or breaks off."""
        import httpx

        started_s, first_s, num_tokens = time.perf_counter(), None, 0
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, headers=self._headers, timeout=_ANSWER_TIMEOUT_S, trust_env=False
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise FailedError(f"the server answered {response.status_code}: {error_message(response)}")
                for event in _events(response.iter_lines()):
                    if usage := event.get("usage"):
                        num_tokens = usage["completion_tokens"]
                    choices = event.get("choices") or []
                    for choice in choices:
                        self.finish_reason = choice.get("finish_reason") or self.finish_reason
                    text = "".join(choice["delta"].get("content") or "" for choice in choices)
                    if text:
                        first_s = first_s or time.perf_counter()
                        yield text
        except httpx.HTTPError as error:
            raise FailedError(f"the server broke off: {error or type(error).__name__}") from None
        ended_s = time.perf_counter()
        self.timing = ChatTiming(num_tokens, (first_s or ended_s) - started_s, ended_s - started_s)


def authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def error_message(response: "httpx.Response") -> str:
    """What an OpenAI-shaped server says of its refusal, else the body as it is."""
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return response.text[:500]


def _events(lines: Iterator[str]) -> Iterator[dict]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`."""
    for line in lines:
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise FailedError(f"the server broke off: {event['error'].get('message', event['error'])}")
        yield event
