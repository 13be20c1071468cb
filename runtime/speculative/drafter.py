"""Drafter: guesses what requests will say next."""

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

    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        """For each item of a step that was computed, and its request as it is now, up to `item.max_draft_tokens` tokens
        that follow: as long as they are worth it by `terms`, and none where nothing speaks for any."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended, or lost its blocks: what is kept of it may go. It may be unknown."""
        ...


class Acceptance:
    """How often a guess was right, by how much spoke for it: a few classes, each counted for itself.

    A share is the mean of a Beta distribution that begins at a prior of PRIOR_GUESSES guesses and remembers the last
    MEMORY or so of them, so that it follows a text that changes. What is paid for goes by `lower`, a standard deviation
    below the mean: guesses that were compared with what came, and not verified, have cost nothing. What is tried goes
    by `upper`, two above it.
    """

    PRIOR_GUESSES = 4.0
    MEMORY = 200.0
    FADE = 1 / 512  # of what is known, for each step in which nothing was learned

    def __init__(self, priors: Sequence[float]) -> None:
        self._right = [self.PRIOR_GUESSES * prior for prior in priors]
        self._made = [self.PRIOR_GUESSES] * len(priors)

    def share(self, level: int) -> float:
        """Of guesses of class `level`; those beyond the last class count as the last."""
        level = min(level, len(self._made) - 1)
        return self._right[level] / self._made[level]

    def lower(self, level: int) -> float:
        return max(0.0, self.share(level) - self._deviation(level))

    def upper(self, level: int) -> float:
        return min(1.0, self.share(level) + 2.0 * self._deviation(level))

    def fade(self) -> None:
        """Nothing was learned for a step: what is not tried would never be found to have become better."""
        self._right = [(1.0 - self.FADE) * right for right in self._right]
        self._made = [(1.0 - self.FADE) * made for made in self._made]

    def _deviation(self, level: int) -> float:
        share, made = self.share(level), self._made[min(level, len(self._made) - 1)]
        return (share * (1.0 - share) / (1.0 + made)) ** 0.5

    def count(self, level: int, is_right: bool) -> None:
        level = min(level, len(self._made) - 1)
        kept = min(1.0, self.MEMORY / self._made[level])
        self._right[level] = kept * self._right[level] + is_right
        self._made[level] = kept * self._made[level] + 1.0
