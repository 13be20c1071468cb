"""Runs a workload against a server: open loop (requests come when they are due) or closed loop (users who wait)."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.load.client import LoadClient
from llmq.profiles.load.metrics import RequestRecord

MakeBody = Callable[[int, Arrival], dict[str, Any]]  # (its number, the arrival) -> the request's body
OnDone = Callable[[RequestRecord], None]


async def open_loop(
    client: LoadClient,
    arrivals: Sequence[Arrival],
    make_body: MakeBody,
    *,
    path: str = "/v1/completions",
    on_done: OnDone | None = None,
) -> list[RequestRecord | None]:
    """Send each request at its time, however many are unanswered. Records are in the order of `arrivals`; None: this
    was cancelled before it was answered."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    records: list[RequestRecord | None] = [None] * len(arrivals)

    async def one_request(number: int, body: dict[str, Any], due_s: float) -> None:
        records[number] = await client.request(path, body, scheduled_s=due_s)
        if on_done is not None:
            on_done(records[number])

    async with _until_cancelled() as tasks:
        for number, arrival in enumerate(arrivals):
            due_s = start_s + arrival.time_s
            body = make_body(number, arrival)  # ahead of time: making it must not delay it
            await asyncio.sleep(due_s - loop.time())
            tasks.append(asyncio.create_task(one_request(number, body, due_s)))
    return records


async def closed_loop(
    client: LoadClient,
    arrivals: Sequence[Arrival],
    make_body: MakeBody,
    *,
    concurrency: int,
    path: str = "/v1/completions",
    on_done: OnDone | None = None,
) -> list[RequestRecord | None]:
    """`concurrency` users, each sending its next request when its last is answered: arrival times are not used.

    A request is due when its user is free. Records are in the order of `arrivals`; None: as in `open_loop`.
    """
    records: list[RequestRecord | None] = [None] * len(arrivals)
    waiting = iter(enumerate(arrivals))

    async def user() -> None:
        for number, arrival in waiting:  # shared: each takes what is next
            records[number] = await client.request(path, make_body(number, arrival))
            if on_done is not None:
                on_done(records[number])

    async with _until_cancelled() as tasks:
        tasks += [asyncio.create_task(user()) for _ in range(min(concurrency, len(arrivals)))]
    return records


@contextlib.asynccontextmanager
async def _until_cancelled() -> AsyncIterator[list[asyncio.Task]]:
    """A list of tasks that have ended when the block has. Cancelled, they are ended too, and nothing is raised."""
    tasks: list[asyncio.Task] = []
    try:
        yield tasks
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def random_prompt_ids(number: int | str, num_tokens: int, vocab_size: int, *, first_id: int = 0) -> list[int]:
    """Token ids from `first_id` up that are the same for the same number and share no block with another number's."""
    ids = random.Random(number)
    return [ids.randrange(first_id, vocab_size) for _ in range(num_tokens)]
