"""Drafters that are right as often as a test wants."""

import random
from collections.abc import Sequence

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.engine import Engine


class KnowingDrafter:
    """Guesses what a plain run said, each token right with probability `share`."""

    name = "knowing"

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, share: float = 1.0) -> None:
        """`texts`: prompt and continuation of every request."""
        self._texts = [list(text) for text in texts]
        self._vocab_size, self._share, self._rng = vocab_size, share, random.Random(0)
        self.num_proposed = 0

    def propose(self, requests: Sequence[RunnerRequest], counts: Sequence[int], least: float) -> list[list[int]]:
        drafts = [self._draft(request.token_ids, count) for request, count in zip(requests, counts, strict=True)]
        self.num_proposed += sum(map(len, drafts))
        return drafts

    def forget(self, request_id: str) -> None:
        pass

    def _draft(self, token_ids: list[int], count: int) -> list[int]:
        known = next((text for text in self._texts if text[: len(token_ids)] == token_ids), [])
        right = known[len(token_ids) :][:count]
        guesses = [self._rng.randrange(3, self._vocab_size) for _ in range(count)]
        return [a if self._rng.random() < self._share else b for a, b in zip(right, guesses, strict=False)]


def use(engine: Engine, drafter) -> Engine:
    """Have an engine with speculation take another drafter."""
    engine.executor.runner.drafter = drafter
    return engine
