"""When requests are sent: at random times, as a trace has them, or when a user is free. One class each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.profiles.load.arrivals import Arrival, random_arrivals, replay
from llmq.profiles.load.generator import closed_loop, open_loop


@dataclass(frozen=True)
class OpenLoop:
    """Requests come at random, whoever is unanswered: the load of many independent users."""

    rate_per_s: float
    burstiness: float = 1.0
    seed: int = 0
    is_open = True

    def __str__(self) -> str:
        kind = "Poisson" if self.burstiness == 1 else f"gamma, burstiness {self.burstiness:g}"
        return f"open loop, {self.rate_per_s:.4g} requests/s ({kind})"

    def arrivals(self, lengths: Sequence[Arrival]) -> list[Arrival]:
        return random_arrivals(lengths, rate_per_s=self.rate_per_s, burstiness=self.burstiness, seed=self.seed)

    async def run(self, *args: Any, **kwargs: Any) -> list:
        return await open_loop(*args, **kwargs)


@dataclass(frozen=True)
class Replay:
    """Requests come when the trace has them, `speed` times as fast."""

    speed: float = 1.0
    is_open = True

    def __str__(self) -> str:
        return f"open loop, the trace's own times at speed {self.speed:g}"

    def arrivals(self, lengths: Sequence[Arrival]) -> list[Arrival]:
        return replay(lengths, speed=self.speed)

    async def run(self, *args: Any, **kwargs: Any) -> list:
        return await open_loop(*args, **kwargs)


@dataclass(frozen=True)
class ClosedLoop:
    """So many users, each waiting for its answer before it asks again: a slow server is asked less often."""

    concurrency: int
    is_open = False

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} at once"

    def arrivals(self, lengths: Sequence[Arrival]) -> list[Arrival]:
        return list(lengths)

    async def run(self, *args: Any, **kwargs: Any) -> list:
        return await closed_loop(*args, **kwargs, concurrency=self.concurrency)


Pacing = OpenLoop | Replay | ClosedLoop
