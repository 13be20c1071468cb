"""LoadClient: one streamed request to an OpenAI-shaped server, timed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from llmq.profiles.load.metrics import RequestRecord

Json = dict[str, Any]

_MOST_DETAIL = 300  # characters of what a server says of an error


class _BrokenOffError(Exception):
    """The answer ended before it was whole; the message is the record's error."""

    def __init__(self, error: str, detail: str = "") -> None:
        super().__init__(error)
        self.detail = detail[:_MOST_DETAIL]


@dataclass
class _Progress:
    """What has come of one answer so far."""

    token_times_s: list[float] = field(default_factory=list)
    event_tokens: list[int | None] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    num_tokens: int = 0
    end_s: float = 0.0
    usage: Json | None = None
    finish_reason: str | None = None


class LoadClient:
    """Streams completions and times them by the running event loop's clock.

    Tokens are counted by the server (`usage`), never by events: an event may bring several tokens, or a token no text.
    With `max_connections` a request beyond them waits for one to be free, and that is in its latency.
    `async with LoadClient(url) as client: record = await client.request("/v1/completions", body)`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_connections: int | None = None,
        count_tokens: Callable[[str], int] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`timeout_s`: without a byte. `count_tokens`: of a text, for a server that sends no usage."""
        self._count_tokens = count_tokens
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            transport=transport,
            trust_env=False,
        )

    async def __aenter__(self) -> "LoadClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get_text(self, path: str) -> str | None:
        """The body of a GET, or None where there is none to be had."""
        try:
            response = await self._http.get(path)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    async def request(
        self, path: str, body: Json, *, scheduled_s: float | None = None, leave_after_events: int | None = None
    ) -> RequestRecord:
        """Send `body` as a stream with usage and read it to its end; never raises for what a server may do.

        Fields of `body` that are None are left out; its own `stream_options` count. `scheduled_s`: when it was due on
        the loop's clock, None: now. `leave_after_events`: close the connection after so many events with text, which
        makes the record's error "left".
        """
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        progress, error, detail = _Progress(), None, ""
        sent = {"stream_options": {"include_usage": True}, **body, "stream": True}
        try:
            async with self._http.stream(
                "POST", path, json={name: value for name, value in sent.items() if value is not None}
            ) as response:
                await _check(response)
                await self._read(response, progress, leave_after_events)
                self._check_whole(progress, body)
        except _BrokenOffError as broken:
            error, detail = str(broken), broken.detail
        except httpx.TimeoutException:
            error = "timed out"
        except httpx.HTTPError as failure:
            error, detail = type(failure).__name__, str(failure)
        if error is not None:
            progress.end_s = clock()
        return _record(sent_s if scheduled_s is None else scheduled_s, sent_s, progress, error, detail)

    async def _read(self, response: httpx.Response, progress: _Progress, leave_after_events: int | None) -> None:
        clock = asyncio.get_running_loop().time
        async for event in _events(response):
            choices = event.get("choices") or []
            now_s = clock()
            usage = event.get("usage")
            if text := "".join(map(_text, choices)):
                progress.token_times_s.append(now_s)
                progress.event_tokens.append(_tokens_so_far(usage))
                if self._count_tokens is not None:
                    progress.text.append(text)
                if len(progress.token_times_s) == leave_after_events:
                    raise _BrokenOffError("left")
            if choices:
                progress.end_s = now_s
            for choice in choices:
                progress.finish_reason = choice.get("finish_reason") or progress.finish_reason
            progress.usage = usage or progress.usage

    def _check_whole(self, progress: _Progress, body: Json) -> None:
        if progress.finish_reason is None:
            raise _BrokenOffError("no finish reason")
        if progress.usage is None and self._count_tokens is not None:
            progress.usage = {
                "prompt_tokens": _count_prompt(body, self._count_tokens),
                "completion_tokens": self._count_tokens("".join(progress.text)),
            }
        if progress.usage is None:
            raise _BrokenOffError("no usage")
        if not progress.token_times_s and progress.usage["completion_tokens"]:
            progress.token_times_s.append(progress.end_s)  # tokens without text: an end token alone
            progress.event_tokens.append(None)


async def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        await response.aread()
        raise _BrokenOffError(f"status {response.status_code}", _error_message(response))
    if response.headers.get("content-type", "").startswith("application/json"):
        raise _BrokenOffError("not a stream")


def _record(scheduled_s: float, sent_s: float, progress: _Progress, error: str | None, detail: str) -> RequestRecord:
    usage = progress.usage or {}
    return RequestRecord(
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        token_times_s=tuple(progress.token_times_s),
        event_tokens=_differences(progress.event_tokens),
        end_s=progress.end_s,
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_output_tokens=usage.get("completion_tokens") or 0,
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        finish_reason=progress.finish_reason,
        error=error,
        error_detail=detail,
    )


def _differences(counts: list[int | None]) -> tuple[int, ...]:
    """Tokens of each event from the totals that events carry; empty where one carries none."""
    if None in counts:
        return ()
    return tuple(count - before for before, count in zip([0, *counts], counts, strict=False))


def _tokens_so_far(usage: Json | None) -> int | None:
    return usage.get("completion_tokens") if usage else None


def _text(choice: Json) -> str:
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return choice.get("text") or delta.get("content") or thought


def _count_prompt(body: Json, count_tokens: Callable[[str], int]) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    texts = [prompt] if prompt is not None else [one["content"] for one in body.get("messages", [])]
    return sum(map(count_tokens, texts))


def _error_message(response: httpx.Response) -> str:
    """What an OpenAI-shaped server says of its refusal, else the body as it is."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text


async def _events(response: httpx.Response) -> AsyncIterator[Json]:
    """The JSON objects of a server-sent event stream up to `[DONE]`, which must come."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise _BrokenOffError("not JSON", data) from None
        if event.get("error"):
            said = event["error"]
            raise _BrokenOffError("error event", str(said.get("message", said) if isinstance(said, dict) else said))
        yield event
    raise _BrokenOffError("no [DONE]")
