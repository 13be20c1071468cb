"""Runs a workload against a server: open loop (requests come when they are due) or closed loop (users who wait)."""

import asyncio
import random
from collections.abc import Callable, Sequence
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
) -> list[RequestRecord]:
    """Send each request at its time, however many are unanswered. Records are in the order of `arrivals`."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def one_request(body: dict[str, Any], due_s: float) -> RequestRecord:
        record = await client.request(path, body, scheduled_s=due_s)
        if on_done is not None:
            on_done(record)
        return record

    tasks = []
    for number, arrival in enumerate(arrivals):
        due_s = start_s + arrival.time_s
        body = make_body(number, arrival)  # ahead of time: making it must not delay it
        await asyncio.sleep(due_s - loop.time())
        tasks.append(asyncio.create_task(one_request(body, due_s)))
    return await asyncio.gather(*tasks)


async def closed_loop(
    client: LoadClient,
    arrivals: Sequence[Arrival],
    make_body: MakeBody,
    *,
    concurrency: int,
    path: str = "/v1/completions",
    on_done: OnDone | None = None,
) -> list[RequestRecord]:
    """`concurrency` users, each sending its next request when its last is answered: arrival times are not used.

    A request is due when its user is free. Records are in the order of `arrivals`.
    """
    records: list[RequestRecord | None] = [None] * len(arrivals)
    waiting = iter(enumerate(arrivals))

    async def user() -> None:
        for number, arrival in waiting:  # shared: each takes what is next
            records[number] = await client.request(path, make_body(number, arrival))
            if on_done is not None:
                on_done(records[number])

    await asyncio.gather(*(user() for _ in range(min(concurrency, len(arrivals)))))
    return records


def random_prompt_ids(number: int | str, num_tokens: int, vocab_size: int, *, first_id: int = 0) -> list[int]:
    """Token ids from `first_id` up that are the same for the same number and share no block with another number's."""
    ids = random.Random(number)
    return [ids.randrange(first_id, vocab_size) for _ in range(num_tokens)]
