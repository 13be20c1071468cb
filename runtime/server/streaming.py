"""Answers that end when the client does: whole or as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from llmq.runtime.frontend.output_processor import SequenceDelta
from llmq.runtime.server.answers import Answer
from llmq.runtime.server.errors import ApiError
from llmq.runtime.server.generation import Choice, Generation
from llmq.runtime.server.responses import SSE_DONE, Json, sse, usage
from llmq.runtime.server.schema import StreamOptions

T = TypeVar("T")
Deltas = AsyncGenerator[tuple[Choice, SequenceDelta], None]


class ClientGoneError(Exception):
    """The client closed its connection: there is nobody to answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at once when the client goes. Raises ClientGoneError then.

    A plain handler is not told (Starlette cancels none), so the connection is watched beside it.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def collect(generation: Generation, deltas: Deltas, answer: Answer) -> Json:
    """The whole answer."""
    async with aclosing(deltas):
        async for choice, delta in deltas:
            answer.add(choice, delta)
    return answer.whole(generation.choices, usage(*generation.usage_counts())) | {"timings": generation.timings()}


async def events(
    generation: Generation, deltas: Deltas, answer: Answer, options: StreamOptions
) -> AsyncIterator[bytes]:
    """The answer as server-sent events, `timings` in the last one with a choice, usage as `options` ask for it.

    An error after the first one is an event itself, and the last."""
    begun = False
    try:
        async with aclosing(deltas):
            async for choice, delta in deltas:
                chunks = answer.chunks(choice, delta)
                if chunks and delta.finish_reason is not None and not generation.num_unfinished:
                    chunks[-1]["timings"] = generation.timings()
                so_far = usage(*generation.usage_counts()) if options.continuous_usage_stats else None
                for chunk in chunks:
                    yield sse(chunk | {"usage": so_far} if options.include_usage else chunk)
                    begun = True
    except ApiError as error:
        if not begun:
            raise
        yield sse(error.body)
        return
    if options.include_usage:
        yield sse(answer.usage_chunk(usage(*generation.usage_counts())))
    yield SSE_DONE


class EventStreamResponse(Response):
    """Sends events as they come. The status line waits for the first of them, so that an early error has a status."""

    def __init__(self, stream: AsyncGenerator[bytes, None], *, around: AbstractContextManager[None]) -> None:
        """`around` is entered for as long as the stream runs, and may refuse it with an ApiError."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.raw_headers[[name for name, _ in self.raw_headers].index(b"content-length")]
        self._stream = stream
        self._around = around

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._around:
                try:
                    await until_disconnect(receive, self._send_all(send))
                finally:
                    await self._stream.aclose()
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ClientGoneError:
            pass

    async def _send_all(self, send: Callable[[Any], Awaitable[None]]) -> None:
        first = await anext(self._stream)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for event in self._stream:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
