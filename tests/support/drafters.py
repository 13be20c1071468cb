"""Drafters that are right as often as a test wants, and what runs with and without them are compared by."""

import random
from collections.abc import Sequence

from engine_driver import Collected

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.engine import Engine
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest


class KnowingDrafter:
    """Guesses what a plain run said, each token right with probability `share`."""

    name = "knowing"
    reads_hidden = "nothing"

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, share: float = 1.0) -> None:
        """`texts`: prompt and continuation of every request."""
        self._texts = [list(text) for text in texts]
        self._vocab_size, self._share, self._rng = vocab_size, share, random.Random(0)
        self.num_proposed = 0

    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        pairs = zip(items, requests, strict=True)
        drafts = [self._draft(request.token_ids, item.max_draft_tokens) for item, request in pairs]
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


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 512) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def everything(made: list[Collected]) -> list[tuple]:
    return [(one.token_ids, one.finish_reason, one.error, [e.token_id for e in one.logprobs]) for one in made]
