"""PassPrice: what a drafter's own computing costs, against what its guesses bring."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from llmq.runtime.scheduler_output import DraftTerms

# A drafter whose first guess has not been worth its time is asked again after so many steps.
PROBE_STEPS = 64
_FORGET = 1 / 8
# A pass over so many tokens says what a token takes of one, a smaller one what any takes.
_MANY_TOKENS = 32


class PassPrice:
    """Of a pass, which gives each request that is guessed on one guess more. As measured, a running mean."""

    def __init__(self) -> None:
        self._pass_s = 0.0
        self._token_s = 0.0  # of a pass over many
        self._num_idle = 0

    def least_chance(self, batch: int, terms: DraftTerms) -> float:
        """That a guess of a pass over `batch` requests has to be right, to repay its part of the pass and its row of
        the next step."""
        return terms.least_chance + (self._pass_s / (batch * terms.token_s) if terms.token_s else 0.0)

    def is_worth_it(self, batch: int, chance: float, terms: DraftTerms) -> bool:
        """Whether first guesses for `batch` requests, right with `chance`, repay a pass. What did not is tried again
        now and then: texts change, and so does the machine."""
        if batch == 0:  # prompts only: they are followed where guesses have been worth it lately
            return self._num_idle == 0
        is_worth = not terms.token_s or chance > self.least_chance(batch, terms)
        self._num_idle = 0 if is_worth else self._num_idle + 1
        return self._num_idle % PROBE_STEPS == 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._pass_s = _mean(self._pass_s, time.perf_counter() - began_s)

    def fits(self, seconds: float) -> bool:
        """Whether a pass ends within `seconds`. A price by which none does is forgotten by and by, and tried again."""
        if self._pass_s <= seconds:
            return True
        self._pass_s *= 1.0 - 1.0 / PROBE_STEPS
        return False

    def tokens_within(self, seconds: float, most: int) -> int:
        """How many tokens a pass can compute in `seconds`, up to `most`."""
        if seconds == float("inf"):
            return most
        if seconds <= 0.0 or not self.fits(seconds):
            return 0
        if not self._token_s:
            return min(most, _MANY_TOKENS)
        return min(most, int((seconds - self._pass_s) / self._token_s))

    def observe(self, num_tokens: int, took_s: float) -> None:
        """A pass over `num_tokens` has taken `took_s`."""
        if num_tokens >= _MANY_TOKENS:
            self._token_s = _mean(self._token_s, max(0.0, took_s - self._pass_s) / num_tokens)
        elif num_tokens:
            self._pass_s = _mean(self._pass_s, took_s)


def _mean(before: float, now: float) -> float:
    return before + _FORGET * (now - before) if before else now
