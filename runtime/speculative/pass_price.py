"""PassPrice: what a drafter's own computing takes, as it was measured."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

_FORGET = 1 / 16
# Until passes of different sizes were seen a token more counts as so much of a pass.
_TOKEN_SHARE = 1 / 12
_PRIOR_PASSES = 0.1
# A pass that takes too long for a step is tried again after some hundred steps.
_FADE = 1 / 64
_WAITING_FADE = 1 / 512


class PassPrice:
    """A pass over n tokens takes a + b · n: the least relative errors over the last passes, older ones forgotten."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._sums = np.zeros((2, 3))  # of a² … a · n … a · 1, each over the time that the pass took
        self._terms = (0.0, 0.0)
        self._fade = 1.0

    @property
    def is_known(self) -> bool:
        return self._terms != (0.0, 0.0)

    def seconds(self, num_tokens: int) -> float:
        """Of a pass over so many tokens, as it may be by now; 0 where there was none yet."""
        return self._fade * self.measured_s(num_tokens)

    def measured_s(self, num_tokens: int) -> float:
        """As it was when there were passes: what one may cost, however long ago that is."""
        return self._terms[0] + self._terms[1] * num_tokens

    @contextmanager
    def timed(self, num_tokens: int) -> Iterator[None]:
        began_s = self.clock()
        yield
        self.observe(num_tokens, self.clock() - began_s)

    def fits(self, num_tokens: int, seconds: float) -> bool:
        """Whether a pass ends within `seconds`. A price by which none does is forgotten by and by, and tried again."""
        if self.seconds(num_tokens) <= seconds:
            return True
        self._fade *= 1.0 - _FADE
        return False

    def wait(self) -> None:
        """There was no pass in a step, for it seemed too dear."""
        self._fade *= 1.0 - _WAITING_FADE

    def tokens_within(self, seconds: float, most: int) -> int:
        """How many tokens a pass can compute in `seconds`, up to `most`."""
        if seconds == float("inf"):
            return most
        if seconds <= 0.0 or not self.fits(1, seconds):
            return 0
        if not self.is_known:
            return min(most, 32)
        token_s = self._fade * self._terms[1]
        return min(most, int((seconds - self.seconds(0)) / token_s) if token_s else most)

    def observe(self, num_tokens: int, took_s: float) -> None:
        """A pass over `num_tokens` has taken `took_s`."""
        if not num_tokens or took_s <= 0.0:
            return
        row = np.array([1.0, num_tokens, took_s]) / took_s
        self._sums = (1.0 - _FORGET) * self._sums + np.outer(row[:2], row)
        # Drawn towards b = _TOKEN_SHARE · a, in the same relative measure.
        prior = np.array([-_TOKEN_SHARE, 1.0]) * num_tokens / took_s
        gram = self._sums[:, :2] + _PRIOR_PASSES * np.outer(prior, prior)
        base, token = np.linalg.lstsq(gram, self._sums[:, 2], rcond=1e-12)[0].tolist()
        if base < 0.0:
            base, token = 0.0, self._sums[1, 2] / self._sums[1, 1]
        elif token < 0.0:
            base, token = self._sums[0, 2] / self._sums[0, 0], 0.0
        self._terms, self._fade = (base, token), 1.0
