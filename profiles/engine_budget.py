"""The KV-cache pool that another engine will allocate, as an interval, and whether a request fits in it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from llmq.profiles.engine_overheads import Overhead, StepShape
from llmq.profiles.vllm_pool import VllmPool


class Fit(Enum):
    FITS = "FITS"
    DOES_NOT_FIT = "DOES NOT FIT"
    UNKNOWN = "UNKNOWN"

    @property
    def exit_code(self) -> int:
        return {Fit.FITS: 0, Fit.DOES_NOT_FIT: 1, Fit.UNKNOWN: 3}[self]


@dataclass(frozen=True)
class Interval:
    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class EngineBudget:
    """Of one rank. Bounds of rows are added up: as if all were at their worst, or at their best, at once."""

    memory_name: str
    memory_bytes: int
    utilization: float
    rows: tuple[Overhead, ...]
    pool: VllmPool
    max_model_len: int
    step: StepShape

    @property
    def requested_bytes(self) -> float:
        return self.memory_bytes * self.utilization

    @property
    def kv_bytes(self) -> Interval:
        """Negative where the rest alone does not fit."""
        total = self.requested_bytes
        return Interval(
            total - sum(row.high for row in self.rows),
            total - sum(row.expected for row in self.rows),
            total - sum(row.low for row in self.rows),
        )

    @property
    def num_blocks(self) -> Interval:
        kv = self.kv_bytes
        return Interval(*(self.pool.num_blocks(one) for one in (kv.low, kv.expected, kv.high)))

    @property
    def logged_tokens(self) -> Interval:
        """The pool's size in tokens, as this version logs it."""
        return self._of_blocks(self.pool.logged_tokens)

    @property
    def concurrency(self) -> Interval:
        """Requests of max_model_len at once."""
        return self._of_blocks(self.pool.concurrency)

    def _of_blocks(self, count: Callable[[int, int], float]) -> Interval:
        blocks = self.num_blocks
        return Interval(*(count(int(one), self.max_model_len) for one in (blocks.low, blocks.expected, blocks.high)))

    @property
    def fit(self) -> Fit:
        """Whether one request of max_model_len fits, without which the engine refuses to start."""
        needed, blocks = self.pool.blocks_for(self.max_model_len), self.num_blocks
        if blocks.low >= needed:
            return Fit.FITS
        return Fit.UNKNOWN if blocks.high >= needed else Fit.DOES_NOT_FIT
