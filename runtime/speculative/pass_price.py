"""PassPrice: what a drafter's own computing costs, against what its guesses bring."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from llmq.runtime.scheduler_output import DraftTerms

# A drafter whose first guess has not been worth its time is asked again after so many steps.
PROBE_STEPS = 64
_FORGET = 1 / 8


class PassPrice:
    """Of a pass, which gives each request that is guessed on one guess more. As measured, a running mean."""

    def __init__(self) -> None:
        self._pass_s = 0.0
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
        took_s = time.perf_counter() - began_s
        self._pass_s = took_s if not self._pass_s else self._pass_s + _FORGET * (took_s - self._pass_s)
