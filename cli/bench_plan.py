"""The options of `llmq bench` as the loads they stand for, checked before anything is asked."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.profiles.errors import InputError

if TYPE_CHECKING:
    from llmq.profiles.load.arrivals import Arrival
    from llmq.profiles.load.measurement import Workload
    from llmq.profiles.load.pacing import Pacing
    from llmq.profiles.slo import Slo

DEFAULT_REQUESTS, DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS = 100, 256, 64
SWEEP_DURATION_S, SWEEP_LEAST_REQUESTS = 30.0, 40

# (options, what makes them meaningless, why): tried in order.
_CONFLICTS = (
    (("rate", "burstiness", "duration", "sweep"), "concurrency", "has no meaning with --concurrency: no rate is set"),
    (("prompt_tokens", "output_tokens"), "trace", "has no meaning with --trace, which brings the lengths"),
    (("requests",), "duration", "says how many, and so does --duration: give one of them"),
    (("length_scale", "speed"), "no trace", "is of a --trace: give one"),
    (("speed",), "own times", "is of a trace's times, which --rate, --concurrency and --sweep replace"),
    (("burstiness",), "replay", "is of --rate, and this trace brings its own times: give --rate"),
)


@dataclass(frozen=True)
class BenchPlan:
    """The options as they were given; None: not. Raises InputError for those that exclude each other."""

    rate: str | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    trace: Path | None = None
    speed: float | None = None
    length_scale: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    requests: int | None = None
    duration: float | None = None
    warmup: int | None = None
    slo_text: str | None = None
    sweep: bool = False
    max_rate: float = 1000.0
    seed: int = 0

    def __post_init__(self) -> None:
        is_so = {
            "concurrency": self.concurrency is not None,
            "trace": self.trace is not None,
            "duration": self.duration is not None,
            "no trace": self.trace is None,
            "own times": not self.replays,
            "replay": self.replays,
        }
        for fields, condition, why in _CONFLICTS:
            for field in fields:
                if is_so[condition] and getattr(self, field) not in (None, False):
                    raise InputError(f"--{field.replace('_', '-')} {why}")
        if self.sweep and self.slo_text is None:
            raise InputError("--sweep finds the highest rate that keeps an SLO: give --slo ttft=500ms,tpot=50ms@p99")
        if math.isinf(self._rate_per_s) and (self.sweep or self.duration is not None):
            raise InputError("--rate inf sends all at once: it goes with --requests, not with --sweep or --duration")

    @property
    def replays(self) -> bool:
        return self.trace is not None and self.rate is None and self.concurrency is None and not self.sweep

    @cached_property
    def slo(self) -> "Slo | None":
        from llmq.profiles.slo import Slo

        return None if self.slo_text is None else Slo.parse(self.slo_text)

    @property
    def start_rate(self) -> float:
        """Where a sweep begins."""
        return min(self._rate_per_s, self.max_rate)

    def check(self) -> None:
        """Raises InputError for what is wrong with a value, before a model is loaded or a server asked."""
        workload = self.workload()
        workload.pacing.arrivals(workload.lengths)
        _ = self.slo

    def workload(self, rate_per_s: float | None = None) -> "Workload":
        """Of the plan, or at another rate than its own. Raises InputError where nothing is left to measure."""
        from llmq.profiles.load.measurement import Workload, cycled
        from llmq.profiles.load.pacing import Replay

        pacing = self._pacing if rate_per_s is None else replace(self._pacing, rate_per_s=rate_per_s)
        if isinstance(pacing, Replay):
            return self._replayed(pacing)
        count = self._num_measured(pacing)
        warmup = self._num_warmup(count)
        return Workload(cycled(self._lengths, count + warmup), pacing, warmup, self.length_scale or 1.0)

    def _replayed(self, pacing: "Pacing") -> "Workload":
        """The trace from its beginning, its first requests being the warm-up."""
        from llmq.profiles.load.measurement import Workload

        duration_s = math.inf if self.duration is None else self.duration
        lengths = [one for one in self._lengths if one.time_s / pacing.speed < duration_s]
        warmup = self._num_warmup(min(self.requests or len(lengths), len(lengths)))
        lengths = lengths[: None if self.requests is None else self.requests + warmup]
        if len(lengths) <= warmup:
            raise InputError(
                f"{self.trace}: {len(lengths)} requests come in that time, of which {warmup} are the warm-up: "
                "a longer --duration, or --warmup 0"
            )
        return Workload(lengths, pacing, warmup, self.length_scale or 1.0)

    def _num_measured(self, pacing: "Pacing") -> int:
        if self.requests is not None:
            return self.requests
        if self.duration is not None or self.sweep:
            count = math.ceil(pacing.rate_per_s * (self.duration or SWEEP_DURATION_S))
            return max(SWEEP_LEAST_REQUESTS if self.sweep else 1, count)
        return DEFAULT_REQUESTS

    def _num_warmup(self, count: int) -> int:
        return max(1, count // 10) if self.warmup is None else self.warmup

    @cached_property
    def _lengths(self) -> "list[Arrival]":
        from llmq.profiles.load.arrivals import Arrival, read_trace, scaled

        if self.trace is None:
            prompt = self.prompt_tokens or DEFAULT_PROMPT_TOKENS
            return [Arrival(0.0, prompt, self.output_tokens or DEFAULT_OUTPUT_TOKENS)]
        return scaled(read_trace(self.trace), self.length_scale or 1.0)

    @cached_property
    def _pacing(self) -> "Pacing":
        from llmq.profiles.load.pacing import ClosedLoop, OpenLoop, Replay

        if self.concurrency is not None:
            return ClosedLoop(self.concurrency)
        if self.replays:
            return Replay(1.0 if self.speed is None else self.speed)
        return OpenLoop(self._rate_per_s, 1.0 if self.burstiness is None else self.burstiness, self.seed)

    @cached_property
    def _rate_per_s(self) -> float:
        try:
            value = float(self.rate or 1.0)
        except ValueError:
            value = math.nan
        if not value > 0:
            raise InputError(f"--rate {self.rate}: requests a second, above 0, or inf")
        return value
