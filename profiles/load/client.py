"""LoadClient: one streamed request to an OpenAI-shaped server, timed."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from llmq.profiles.load.metrics import RequestRecord

Json = dict[str, Any]


class _BrokenOffError(Exception):
    """The answer ended before it was whole; the message is the record's error."""


@dataclass
class _Progress:
    """What has come of one answer so far."""

    token_times_s: list[float]
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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
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

    async def request(
        self, path: str, body: Json, *, scheduled_s: float | None = None, leave_after_events: int | None = None
    ) -> RequestRecord:
        """Send `body` as a stream with usage and read it to its end; never raises for what a server may do.

        `scheduled_s`: when it was due on the loop's clock, None: now. `leave_after_events`: close the connection after
        so many events with text, which makes the record's error "left".
        """
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        progress, error = _Progress([]), None
        try:
            async with self._http.stream(
                "POST", path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
            ) as response:
                if response.status_code != 200:
                    raise _BrokenOffError(f"status {response.status_code}")
                await self._read(response, progress, leave_after_events)
        except _BrokenOffError as broken:
            error = str(broken)
        except httpx.TimeoutException:
            error = "timed out"
        except httpx.HTTPError as failure:
            error = type(failure).__name__
        return self._record(sent_s if scheduled_s is None else scheduled_s, sent_s, progress, error)

    async def _read(self, response: httpx.Response, progress: _Progress, leave_after_events: int | None) -> None:
        clock = asyncio.get_running_loop().time
        async for event in _events(response):
            choices = event.get("choices") or []
            now_s = clock()
            if any(_text(choice) for choice in choices):
                progress.token_times_s.append(now_s)
                if len(progress.token_times_s) == leave_after_events:
                    raise _BrokenOffError("left")
            if choices:
                progress.end_s = now_s
            for choice in choices:
                progress.finish_reason = choice.get("finish_reason") or progress.finish_reason
            progress.usage = event.get("usage") or progress.usage
        if progress.finish_reason is None:
            raise _BrokenOffError("no finish reason")
        if progress.usage is None:
            raise _BrokenOffError("no usage")
        if not progress.token_times_s and progress.usage["completion_tokens"]:
            progress.token_times_s.append(progress.end_s)  # tokens without text: an end token alone

    def _record(self, scheduled_s: float, sent_s: float, progress: _Progress, error: str | None) -> RequestRecord:
        usage = progress.usage or {}
        return RequestRecord(
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            token_times_s=tuple(progress.token_times_s),
            end_s=progress.end_s,
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_output_tokens=usage.get("completion_tokens", 0),
            num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            finish_reason=progress.finish_reason,
            error=error,
        )


def _text(choice: Json) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


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
            raise _BrokenOffError("not JSON") from None
        if "error" in event:
            raise _BrokenOffError("error event")
        yield event
    raise _BrokenOffError("no [DONE]")
