"""What a service promises: limits on a request's latencies, and for how many requests they must hold."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from llmq.profiles.errors import InputError

_METRICS = ("ttft", "tpot", "e2e")
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(ms|s)")
_PERCENTILE = re.compile(r"p([0-9]{1,2}(?:\.[0-9]+)?)")
_SYNTAX = "write ttft=500ms,tpot=50ms@p99: any of ttft, tpot and e2e, in ms or s, and the share of requests at the end"


class Verdict(Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    NOT_ENOUGH = "NOT ENOUGH REQUESTS"


class Timed(Protocol):
    """What a limit is held against: `profiles.load.metrics.RequestRecord`."""

    error: str | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float


@dataclass(frozen=True)
class Slo:
    """`limits_s`: metric -> seconds. `percentile` of all requests must meet all limits at once, an error meets none."""

    limits_s: dict[str, float]
    percentile: float = 99.0

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Of "ttft=500ms,tpot=50ms@p99"; without @pN it is p99. Raises InputError."""
        limits, _, share = text.partition("@")
        percentile = _PERCENTILE.fullmatch(share or "p99")
        found: dict[str, float] = {}
        for part in limits.split(","):
            name, _, value = part.strip().partition("=")
            duration = _DURATION.fullmatch(value.strip())
            if name not in _METRICS or not duration or name in found or float(duration[1]) == 0:
                raise InputError(f"--slo {text}: '{part}' is no limit; {_SYNTAX}")
            found[name] = float(duration[1]) / (1000 if duration[2] == "ms" else 1)
        if not percentile or float(percentile[1]) == 0:
            raise InputError(f"--slo {text}: '@{share}' is no share of the requests; {_SYNTAX}")
        return cls(found, float(percentile[1]))

    def __str__(self) -> str:
        limits = ",".join(f"{name}={_spelled(limit)}" for name, limit in self.limits_s.items())
        return f"{limits}@p{self.percentile:g}"

    def is_met_by(self, one: Timed) -> bool:
        """Whether an answered request kept every limit. A single token has no TPOT, and keeps it."""
        if one.error is not None:
            return False
        measured = {"ttft": one.ttft_s, "tpot": one.tpot_s, "e2e": one.e2e_s}
        return all(measured[name] is None or measured[name] <= limit for name, limit in self.limits_s.items())

    def verdict(self, requests: Sequence[Timed]) -> Verdict:
        """NOT_ENOUGH: all is well so far, in fewer requests than one late one may be among (100 for p99)."""
        num_good = sum(map(self.is_met_by, requests))
        if not requests or num_good < len(requests) * self.percentile / 100 - 1e-9:
            return Verdict.FAIL if requests else Verdict.NOT_ENOUGH
        return Verdict.PASS if len(requests) * (1 - self.percentile / 100) >= 1 - 1e-9 else Verdict.NOT_ENOUGH


def _spelled(seconds: float) -> str:
    return f"{seconds * 1000:g}ms" if seconds < 1 else f"{seconds:g}s"
