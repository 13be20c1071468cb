"""May a candidate replace its baseline? Paired statistics over the items that both answered.

Every item counts once for each model, so that what both get right or wrong cancels: with p10 and p01 the shares of
items that only the one or the other gets right, the drop p10 - p01 has a variance of (p10 + p01 - (p10 - p01)²) / n,
which for two nearly equal models is a small part of that of two accuracies measured apart.

The verdict is a test of non-inferiority with a margin (`max_drop`): PASS where the drop is below the margin with 95 %
confidence, FAIL where it is above it with 95 % confidence, NOT ENOUGH ITEMS in between, with how many would decide it
if the shares stay what they are.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from llmq.profiles.errors import InputError

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
_SEED = 0
# Resamples drawn at once: 256 x 10,000 items x 8 B = 20 MB.
_RESAMPLES_AT_ONCE = 256

DEFINITIONS = {
    "drop": "baseline's mean score - candidate's, over the same items; above 0: the candidate is worse",
    "interval": "95 % of paired bootstrap resamples (10,000, percentiles) have a drop in it",
    "lost, won": "items that only the baseline, only the candidate gets right",
    "mcnemar_p": "exact McNemar: how often a fair coin, tossed for each such item, comes out this uneven or more",
}


class Verdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    NOT_ENOUGH = "NOT ENOUGH ITEMS"

    @property
    def exit_code(self) -> int:
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.NOT_ENOUGH: 3}[self]


@dataclass(frozen=True)
class PairedComparison:
    """Both models' scores on the same items. `lost`, `won` and `mcnemar_p` are None where a score is not 0 or 1."""

    num_items: int
    baseline: float
    candidate: float
    drop: float
    interval: tuple[float, float]
    one_sided: tuple[float, float]  # bounds that the drop is above, below with 95 % confidence each
    lost: int | None
    won: int | None
    mcnemar_p: float | None

    def verdict(self, max_drop: float) -> Verdict:
        above, below = self.one_sided
        if below <= max_drop:
            return Verdict.PASS
        return Verdict.FAIL if above > max_drop else Verdict.NOT_ENOUGH

    def items_needed(self, max_drop: float) -> int | None:
        """About how many items decide if the shares stay; None where no number would: the drop equals the margin.

        The half-width of the interval falls with the root of the number of items.
        """
        if self.verdict(max_drop) is not Verdict.NOT_ENOUGH:
            return self.num_items
        gap = abs(max_drop - self.drop)
        half_width = self.one_sided[1] - self.drop if self.drop < max_drop else self.drop - self.one_sided[0]
        if gap < 1e-9:
            return None
        return math.ceil(self.num_items * (half_width / gap) ** 2)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_scores(baseline: Sequence[float], candidate: Sequence[float]) -> PairedComparison:
    """Compare item by item: `baseline[i]` and `candidate[i]` are scores (higher is better) of one item.

    Raises InputError where there is no item, ValueError on unequal lengths.
    """
    if len(baseline) != len(candidate):
        raise ValueError(f"{len(baseline)} and {len(candidate)} scores are no pairs")
    if not len(baseline):
        raise InputError("there is no item to compare")
    base, cand = np.asarray(baseline, dtype=float), np.asarray(candidate, dtype=float)
    difference = base - cand
    is_binary = bool(np.isin(np.concatenate([base, cand]), (0.0, 1.0)).all())
    lost, won = int((difference > 0).sum()), int((difference < 0).sum())
    drops = _resampled_means(difference)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drops, [tail, 1 - tail])
    above, below = _one_sided(difference, drops, lost, won, is_binary)
    return PairedComparison(
        num_items=len(base),
        baseline=float(base.mean()),
        candidate=float(cand.mean()),
        drop=float(difference.mean()),
        interval=(float(low), float(high)),
        one_sided=(above, below),
        lost=lost if is_binary else None,
        won=won if is_binary else None,
        mcnemar_p=exact_mcnemar(lost, won) if is_binary else None,
    )


def exact_mcnemar(lost: int, won: int) -> float:
    """Two-sided exact p of `lost` and `won` discordant pairs under a fair coin (McNemar 1947, the binomial form)."""
    n, least = lost + won, min(lost, won)
    if n == 0:
        return 1.0
    tail = math.fsum(math.exp(_log_binomial(n, k) - n * math.log(2)) for k in range(least + 1))
    return min(1.0, 2 * tail)


def _one_sided(difference: np.ndarray, drops: np.ndarray, lost: int, won: int, is_binary: bool) -> tuple[float, float]:
    """Bounds of the drop, each of 95 %: of the bootstrap, and for few discordant items no narrower than an exact one.

    Resampling items that never differ says that the drop is 0 for certain. With d discordant items among n, a share of
    discordant items up to the Clopper-Pearson bound is still likely, and each could have been a loss (or a win).
    """
    above, below = (float(bound) for bound in np.quantile(drops, [1 - CONFIDENCE, CONFIDENCE]))
    if is_binary and lost + won < 10:
        n = len(difference)
        below = max(below, _upper_share(lost, n) - won / n)
        above = min(above, lost / n - _upper_share(won, n))
    return above, below


def _upper_share(successes: int, n: int) -> float:
    """The 95 % upper Clopper-Pearson bound of a binomial share: where P(X <= successes) falls to 5 %."""
    low, high = successes / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _binomial_cdf(successes, n, middle) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _binomial_cdf(k: int, n: int, p: float) -> float:
    if p >= 1.0:
        return 1.0 if k >= n else 0.0
    if p <= 0.0:
        return 1.0
    return math.fsum(
        math.exp(_log_binomial(n, i) + i * math.log(p) + (n - i) * math.log1p(-p)) for i in range(min(k, n) + 1)
    )


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _resampled_means(values: np.ndarray) -> np.ndarray:
    """Means of bootstrap resamples, [NUM_RESAMPLES]; the same ones for the same values in any order."""
    generator, values = np.random.default_rng(_SEED), np.sort(values)
    means = []
    for start in range(0, NUM_RESAMPLES, _RESAMPLES_AT_ONCE):
        count = min(_RESAMPLES_AT_ONCE, NUM_RESAMPLES - start)
        means.append(values[generator.integers(0, len(values), (count, len(values)))].mean(axis=1))
    return np.concatenate(means)
