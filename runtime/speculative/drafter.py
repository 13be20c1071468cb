"""Drafter: guesses what requests will say next."""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest


class Drafter(Protocol):
    """A guess costs time where it is wrong and changes no token: the model itself verifies each."""

    name: str
    # Which rows of `RunnerRequest.hidden` the runner keeps for it: all of a step, or of those that sample the last.
    reads_hidden: Literal["nothing", "last", "all"]

    num_pooled: int  # tokens guessed by what other requests said
    computes: bool  # its guesses take passes or products: with an adaptive policy they are timed before it serves

    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        """For each item of a step that was computed, and its request as it is now, up to `item.max_draft_tokens` tokens
        that follow: as long as they are worth it by `terms`, and none where nothing speaks for any."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended, or lost its blocks: what is kept of it may go. It may be unknown."""
        ...

    def end_trial(self) -> None:
        """The steps so far were of random text: what guesses took is remembered, and not how often they were right."""
        ...


class Acceptance:
    """How often a guess was right, by how much spoke for it: a few classes, each counted for itself.

    A share is the mean of a Beta distribution that begins at a prior of PRIOR_GUESSES guesses and remembers the last
    MEMORY or so of them. Beside it the last RECENT or so are counted: where fewer are right than could be (SURPRISE) of
    the same text, it has become another one, and what was known before is forgotten. What is paid for goes by `lower`,
    a standard deviation below the mean: guesses that were compared with what came, and not verified, have cost nothing.
    What is tried goes by `upper`, two above it.
    """

    PRIOR_GUESSES = 4.0
    MEMORY, RECENT = 200.0, 16.0
    SURPRISE = 8.0  # of the likelihood ratio test: a text that stays the same exceeds it in 1 of 200 trials
    FADE = 1 / 512  # of what is known, for each step in which nothing was learned

    def __init__(self, priors: Sequence[float]) -> None:
        self._right = [self.PRIOR_GUESSES * prior for prior in priors]
        self._made = [self.PRIOR_GUESSES] * len(priors)
        self._recent = list(priors)  # shares of the last ones
        self._lower: list[float | None] = [None] * len(priors)  # asked for often, and seldom another

    def share(self, level: int) -> float:
        """Of guesses of class `level`; those beyond the last class count as the last."""
        level = min(level, len(self._made) - 1)
        return self._right[level] / self._made[level]

    def lower(self, level: int) -> float:
        level = min(level, len(self._lower) - 1)
        if (lower := self._lower[level]) is None:
            lower = self._lower[level] = max(0.0, self.share(level) - self._deviation(level))
        return lower

    def upper(self, level: int) -> float:
        return min(1.0, self.share(level) + 2.0 * self._deviation(level))

    def fade(self) -> None:
        """Nothing was learned for a step: what is not tried would never be found to have become better."""
        self._right = [(1.0 - self.FADE) * right for right in self._right]
        self._made = [(1.0 - self.FADE) * made for made in self._made]
        self._lower = [None] * len(self._lower)

    def _deviation(self, level: int) -> float:
        share, made = self.share(level), self._made[min(level, len(self._made) - 1)]
        return (share * (1.0 - share) / (1.0 + made)) ** 0.5

    def count(self, level: int, is_right: bool) -> None:
        level = min(level, len(self._made) - 1)
        self._lower[level] = None
        kept = min(1.0, self.MEMORY / self._made[level])
        self._right[level] = kept * self._right[level] + is_right
        self._made[level] = kept * self._made[level] + 1.0
        recent = self._recent[level] = self._recent[level] + (is_right - self._recent[level]) / self.RECENT
        num_recent = 2.0 * self.RECENT - 1.0  # a mean that forgets is as good as one of so many
        share = self.share(level)
        # One that has become better is found so by and by: a few lucky guesses would be believed.
        if recent < share and 2.0 * num_recent * _divergence(recent, share) > self.SURPRISE:
            made = min(self._made[level], self.RECENT)
            self._right[level], self._made[level] = made * recent, made


def _divergence(p: float, q: float) -> float:
    """Of a coin that falls right with p from one with q (Kullback and Leibler), in nats."""
    # A share may be rounded to 1.
    return sum(a * math.log(a / max(b, 1e-12)) for a, b in ((p, q), (1.0 - p, 1.0 - q)) if a > 0.0)
