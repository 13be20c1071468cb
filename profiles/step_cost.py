"""What a step of a given shape will take: linear in a few physical terms, followed while the machine runs.

The terms are those of a roofline (`profiles/roofline.py`) taken one by one: what every step reads and launches, the
products of a token, a sequence's row of logits and sample, K and V that are read, and the arithmetic of attention.

Of few tokens a step's time is no line: kernels take them by tiles, and the first rows of a tile cost next to nothing.
So up to 64 tokens each stretch between two of ROW_KNOTS has a price of its own.
"""

import itertools
import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from llmq.profiles.roofline import DecoderWork, Machine

WINDOW = 256  # steps that the terms are fitted to
# A fit takes a millisecond: often while little is known, seldom beside steps of a few milliseconds.
REFIT_STEPS, LATER_REFIT_STEPS = 16, 64
# The machine's speed as a whole changes faster than its terms against each other: it is read off this many steps.
SPEED_STEPS = 24
SPEED_RANGE = (0.25, 4.0)
# Weight of the first cost against the window, in steps: what the window does not tell apart stays as it was.
PRIOR_STEPS = 2.0
SMALLEST_SHARE = 0.02  # of a step, as which a term counts that is less, or not in the window
MOST_WEIGHT = 100.0
# A request's TPOT is the mean of its steps: the spread that matters is that of means over a few steps in a row.
RUN_STEPS = 4
MIN_RUNS, MAX_RUNS = 12, 128
UNKNOWN_SPREAD = 1.15  # until there are MIN_RUNS
MOST_SPREAD = 2.0
# A step's tokens are priced by themselves from each of these to the next.
ROW_KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
ROW_PRIOR_STEPS = 16.0  # as PRIOR_STEPS, of each of their prices
ROW_SMOOTH_STEPS = 0.001  # weight of neighbouring prices being equal, in steps: what the steps do not tell apart
_HUBER = 1.345  # of the residuals' scale: 95 % as efficient as least squares where they are normal
_FIT_ROUNDS = 4
_MOST_TOKENS = 2**31 - 1
NUM_TERMS = 5  # of a StepCost, without the prices of stretches


@dataclass(frozen=True)
class StepShape:
    """What a step computes."""

    num_tokens: int  # that go through the layers
    num_sequences: int  # that they belong to
    context_tokens: int  # whose K and V are read: what each sequence has after the step
    attention_pairs: int  # a query and a token that it sees

    @classmethod
    def chunk(cls, num_new: int, num_computed: int = 0) -> "StepShape":
        """`num_new` tokens of one sequence after `num_computed`; with num_new 1 a decode step's share."""
        return cls(num_new, 1, num_computed + num_new, num_new * num_computed + num_new * (num_new + 1) // 2)

    @classmethod
    def decode(cls, batch: int, context: int) -> "StepShape":
        """One token for each of `batch` sequences, which then have `context` tokens each."""
        return cls(batch, batch, batch * context, batch * context)

    def __add__(self, other: "StepShape") -> "StepShape":
        return StepShape(*map(operator.add, self.counts, other.counts))

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.num_tokens, self.num_sequences, self.context_tokens, self.attention_pairs


NOTHING = StepShape(0, 0, 0, 0)


@dataclass(frozen=True)
class StepCost:
    """Seconds: of any step, and of each thing that `StepShape` counts. Up to the last of ROW_KNOTS a token costs what
    `row_s` says of its stretch, and `token_s` where that is empty.

    A sum where a roofline takes the longer of moving and computing: an upper bound of it, by at most a factor of two.
    Windows and chunks of attention are not told apart: their layers count as if they saw everything.
    """

    fixed_s: float
    token_s: float
    sequence_s: float
    context_token_s: float
    pair_s: float
    row_s: tuple[float, ...] = ()

    @classmethod
    def of_terms(cls, terms: Sequence[float]) -> "StepCost":
        """`terms` as `_matrix` has its columns."""
        return cls(*terms[:NUM_TERMS], tuple(terms[NUM_TERMS:]))

    @property
    def terms(self) -> tuple[float, ...]:
        return (self.fixed_s, self.token_s, self.sequence_s, self.context_token_s, self.pair_s, *self._row_s)

    @property
    def _row_s(self) -> tuple[float, ...]:
        return self.row_s or (self.token_s,) * (len(ROW_KNOTS) - 1)

    @cached_property
    def _few_tokens_s(self) -> np.ndarray:
        """[ROW_KNOTS[-1] + 1]: of no token, one, two, …"""
        at_knots_s = self.token_s + np.concatenate([[0.0], np.cumsum(np.diff(ROW_KNOTS) * self._row_s)])
        return np.interp(np.arange(ROW_KNOTS[-1] + 1), (0, *ROW_KNOTS), (0.0, *at_knots_s))

    def tokens_s(self, num_tokens: int | np.ndarray) -> float | np.ndarray:
        """Of the layers' products of so many tokens."""
        few, most = self._few_tokens_s, ROW_KNOTS[-1]
        if isinstance(num_tokens, int):
            return float(few[min(num_tokens, most)]) + self.token_s * max(0, num_tokens - most)
        return few[np.minimum(num_tokens, most)] + self.token_s * np.maximum(0, num_tokens - most)

    def rows_more_s(self, num_tokens: int, context: float, most: int) -> np.ndarray:
        """[most + 1]: what 0 to `most` rows more add to a step of `num_tokens`, for sequences of `context` tokens. A
        row is sampled, and reads K and V that the step reads already."""
        rows = np.arange(most + 1)
        own_s = (self.sequence_s + self.pair_s * context) * rows
        return own_s + self.tokens_s(num_tokens + rows) - self.tokens_s(num_tokens)

    def step_s(self, shape: StepShape) -> float:
        return self.fixed_s + self.more_s(shape)

    def more_s(self, shape: StepShape, beside: int = 0) -> float:
        """What `shape` adds to a step of so many other tokens."""
        return (
            self.tokens_s(beside + shape.num_tokens)
            - self.tokens_s(beside)
            + self.sequence_s * shape.num_sequences
            + self.context_token_s * shape.context_tokens
            + self.pair_s * shape.attention_pairs
        )

    def scaled(self, factor: float) -> "StepCost":
        return StepCost.of_terms([factor * term for term in self.terms])

    def tokens_within(self, seconds: float, num_computed: int, beside: int = 0) -> int:
        """Most tokens of a sequence that has `num_computed` which a step of `beside` other tokens computes in `seconds`
        beyond what those take."""
        if seconds - self.sequence_s - self.context_token_s * num_computed <= 0:
            return 0
        if not self.row_s:
            return self._tokens_on_a_line(self.token_s, seconds, num_computed)
        most = self._tokens_on_a_line(min(self.token_s, *self.row_s), seconds, num_computed)
        if most == _MOST_TOKENS:
            return most
        # The root may be off by a rounding.
        numbers = range(1, most + 2)
        return bisect_right(numbers, seconds, key=lambda n: self.more_s(StepShape.chunk(n, num_computed), beside))

    def _tokens_on_a_line(self, token_s: float, seconds: float, num_computed: int) -> int:
        """n tokens take a·n² + b·n + c: pairs grow with the square of a chunk."""
        left_s = seconds - self.sequence_s - self.context_token_s * num_computed
        square = self.pair_s / 2
        linear = token_s + self.context_token_s + self.pair_s * (num_computed + 0.5)
        if left_s == float("inf") or (linear <= 0 and square <= 0):
            return _MOST_TOKENS
        # The root in the form that does not cancel where pairs cost next to nothing.
        tokens = 2 * left_s / (linear + (linear * linear + 4 * square * left_s) ** 0.5)
        return int(min(tokens, _MOST_TOKENS))

    @classmethod
    def from_roofline(cls, work: DecoderWork, machine: Machine) -> "StepCost":
        """The floor of each term on `machine`: nobody reaches it, but it says how terms compare before anything ran."""
        alone, longer = work.decode(1, 1), work.decode(1, 1 + work.layout.groups[0].block_tokens)
        attended = sum(per_token for per_token, _ in work.attention_layers)
        head_flops = 2 * work.head_parameters / work.ranks
        pair_flops = 2 * attended / work.ranks
        return cls(
            fixed_s=alone.weight_bytes / machine.bandwidth_bytes_per_s,
            token_s=(alone.flops - head_flops - pair_flops) / machine.flops_per_s,
            sequence_s=head_flops / machine.flops_per_s,
            context_token_s=(longer.kv_bytes - alone.kv_bytes)
            / work.layout.groups[0].block_tokens
            / machine.bandwidth_bytes_per_s,
            pair_s=pair_flops / machine.flops_per_s,
        )

    @classmethod
    def fitted(cls, shapes: Sequence[StepShape], times_s: Sequence[float], *, is_line: bool = False) -> "StepCost":
        """To steps that were measured: the least relative errors, outliers weighted down (Huber), no term below 0.
        is_line: one price for every token.

        Raises ValueError without a step. Terms that the steps do not tell apart are spread over them.
        """
        if not len(times_s):
            raise ValueError("no measured step")
        return cls.of_terms(_fit(_matrix(shapes, is_line), np.asarray(times_s, dtype=float)).tolist())


class StepCostModel:
    """A StepCost that follows what the steps took, and how far off it is.

    Bounded window and no forgetting factor: a window of equal steps says nothing of how the time divides into terms,
    and what it does not say is kept from the first cost (a ridge towards it, scaled by the machine's speed), where
    recursive least squares with forgetting would let it wander.
    """

    def __init__(self, first: StepCost, *, is_line: bool = False) -> None:
        """is_line: one price for every token, of `first` too. Where steps are noisy fewer prices are surer ones."""
        self._first = self._terms = first
        self._is_line = is_line
        self._speed = 1.0
        self._cost: StepCost | None = first  # as the machine is at the moment; None: not asked for yet
        self._steps: deque[tuple[StepShape, float]] = deque(maxlen=WINDOW)
        self._recent: deque[float] = deque(maxlen=SPEED_STEPS)
        self._run: list[tuple[float, float]] = []
        self._runs: deque[float] = deque(maxlen=MAX_RUNS)
        self._num_steps = 0

    @property
    def cost(self) -> StepCost:
        """As the machine is at the moment."""
        if self._cost is None:
            self._cost = self._terms.scaled(self._speed)
        return self._cost

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of `shape` took `seconds`."""
        if not seconds > 0:
            return
        expected_s = self._terms.step_s(shape)
        self._run.append((seconds, self._speed * expected_s))
        if len(self._run) == RUN_STEPS:
            measured, predicted = map(sum, zip(*self._run, strict=True))
            self._runs.append(measured / predicted if predicted > 0 else MOST_SPREAD)
            self._run = []
        self._steps.append((shape, seconds))
        self._num_steps += 1
        if self._num_steps % (REFIT_STEPS if self._num_steps < WINDOW else LATER_REFIT_STEPS) == 0:
            self._refit()  # reads this step too
        else:
            self._recent.append(_ratio(seconds, expected_s))
        self._speed = min(max(median(self._recent), SPEED_RANGE[0]), SPEED_RANGE[1])
        self._cost = None

    def spread(self, percentile: float) -> float:
        """What a few steps in a row take over what was predicted of them before: at most this in `percentile` of 100
        cases, by those seen lately. At least 1."""
        if len(self._runs) < MIN_RUNS:
            return UNKNOWN_SPREAD
        return float(np.clip(np.percentile(self._runs, percentile), 1.0, MOST_SPREAD))

    def _refit(self) -> None:
        shapes, times_s = zip(*self._steps, strict=True)
        matrix, measured = _matrix(shapes, self._is_line), np.array(times_s)
        first = np.array(self._first.terms)[: matrix.shape[1]]
        predicted = matrix @ first
        speed = float(np.median(measured[predicted > 0] / predicted[predicted > 0])) if (predicted > 0).any() else 1.0
        self._terms = StepCost.of_terms(_fit(matrix, measured, speed * first).tolist())
        self._recent = deque(
            (_ratio(seconds, self._terms.step_s(shape)) for shape, seconds in list(self._steps)[-SPEED_STEPS:]),
            maxlen=SPEED_STEPS,
        )


def _ratio(measured_s: float, predicted_s: float) -> float:
    return measured_s / predicted_s if predicted_s > 0 else SPEED_RANGE[1]


def _matrix(shapes: Sequence[StepShape], is_line: bool) -> np.ndarray:
    """[steps, terms]: those of the line, then tokens in each stretch of ROW_KNOTS."""
    line = np.array([(1, *shape.counts) for shape in shapes], dtype=float)
    if is_line:
        return line
    knots, tokens = np.array(ROW_KNOTS, dtype=float), line[:, 1:2]
    inside = np.clip(tokens - knots[:-1], 0, np.diff(knots))
    line[:, 1:2] -= inside.sum(axis=1, keepdims=True)
    return np.hstack([line, inside])


def _fit(matrix: np.ndarray, measured: np.ndarray, first: np.ndarray | None = None) -> np.ndarray:
    """Terms, none below 0, by iteratively reweighted least squares of (measured - predicted) / predicted; with
    `first` drawn towards it where the steps say nothing."""
    seen = matrix.mean(axis=0) / measured.mean()  # a term times this is its share of a mean step
    used = seen > 0
    if first is not None:
        # Where no step has what a term counts, any scale will do.
        seen = np.where(used, seen, SMALLEST_SHARE / np.where(first > 0, first, 1))
        used |= first > 0
    used[1] = used[NUM_TERMS:] = True  # prices of a token are known by each other
    seen = np.where(seen > 0, seen, 1 / measured.mean())
    columns = matrix[:, used] / seen[used]  # so that what is fitted are shares
    ridge, aim = _even_prices(measured.mean(), seen)[:, used], np.zeros(len(ROW_KNOTS) - 1)
    if first is not None:
        shares = (first * seen)[used]
        # A term with next to no share must not be multiplied by what is left over of the others.
        rare = np.clip(SMALLEST_SHARE / np.maximum(shares, 1e-12), 1, MOST_WEIGHT) * (shares > 0) + (shares == 0)
        steps = np.where(np.arange(len(first)) < NUM_TERMS, PRIOR_STEPS, ROW_PRIOR_STEPS)[used]
        own = np.diag(np.sqrt(steps) * rare)
        ridge, aim = np.vstack([ridge, own]), np.concatenate([ridge @ shares, own @ shares])
    expected = measured
    weights = np.ones(len(measured))
    for _ in range(_FIT_ROUNDS):
        rows = (weights / expected)[:, None] * columns
        found = _non_negative(np.vstack([rows, ridge]), np.concatenate([weights * measured / expected, aim]))
        predicted = columns @ found
        expected = np.maximum(predicted, 0.1 * measured)
        residuals = np.abs(measured / expected - 1)
        limit = _HUBER * max(1.4826 * float(np.median(residuals)), 0.01)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(residuals, 1e-12)))
    terms = np.zeros(matrix.shape[1])
    terms[used] = found / seen[used]
    return terms


def _even_prices(mean_s: float, seen: np.ndarray) -> np.ndarray:
    """[stretches, terms]: how a token's price, eight times, changes as a share of a mean step from one stretch to the
    next, and from the last to what lies beyond."""
    rows = np.zeros((len(ROW_KNOTS) - 1, len(seen)))
    prices = [*range(NUM_TERMS, len(seen)), 1]
    for row, (one, other) in enumerate(itertools.pairwise(prices)):
        rows[row, one], rows[row, other] = -8 / (mean_s * seen[one]), 8 / (mean_s * seen[other])
    return np.sqrt(ROW_SMOOTH_STEPS) * rows


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with no coefficient below 0: the most negative one is left out until there is none."""
    kept = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    gram, aim = matrix.T @ matrix, matrix.T @ target
    while kept:
        solved = np.linalg.lstsq(gram[np.ix_(kept, kept)], aim[kept], rcond=1e-12)[0]
        if (solved >= 0).all():
            found[kept] = solved
            break
        kept.pop(int(solved.argmin()))
    return found
