"""What a load run measured: one record a request, and the percentiles that servers are compared by.

Times are seconds of one monotonic clock. Latency counts from when a request was due, not from when it was sent: a
generator that falls behind would otherwise hide the very waiting it causes (coordinated omission).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class RequestRecord:
    """One request as its client saw it. Without `error`, it was answered to the end and its tokens are known."""

    scheduled_s: float
    sent_s: float
    token_times_s: tuple[float, ...] = ()  # of each event that brought text; one may bring several tokens
    end_s: float = 0.0  # of the event that ended the answer
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # "status 429", "timed out", …: in words that can be counted

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """From when it was due to the end of the answer."""
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (E2E - TTFT) / (N - 1). None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between events that brought text."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]


@dataclass(frozen=True)
class Distribution:
    count: int
    mean: float
    percentiles: dict[int, float]
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """None where there is no value. Percentiles are linear between the two nearest."""
        if not len(values):
            return None
        points = np.percentile(values, PERCENTILES)
        return cls(
            count=len(values),
            mean=float(np.mean(values)),
            percentiles=dict(zip(PERCENTILES, map(float, points), strict=True)),
            highest=float(max(values)),
        )


@dataclass(frozen=True)
class LoadSummary:
    """Latencies in seconds, of the requests that were answered; the others are counted by their error."""

    num_requests: int
    num_answered: int
    duration_s: float  # from the first request due to the last answer's end
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    send_lag: Distribution | None  # how late the generator itself was
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.num_answered / self.duration_s if self.duration_s else 0.0


def summarize(records: Sequence[RequestRecord]) -> LoadSummary:
    answered = [one for one in records if one.error is None]
    begin = min((one.scheduled_s for one in records), default=0.0)
    end = max((one.end_s for one in answered), default=begin)
    return LoadSummary(
        num_requests=len(records),
        num_answered=len(answered),
        duration_s=end - begin,
        prompt_tokens=sum(one.num_prompt_tokens for one in answered),
        cached_tokens=sum(one.num_cached_tokens for one in answered),
        output_tokens=sum(one.num_output_tokens for one in answered),
        ttft=Distribution.of([one.ttft_s for one in answered if one.token_times_s]),
        tpot=Distribution.of([tpot for one in answered if one.token_times_s and (tpot := one.tpot_s) is not None]),
        itl=Distribution.of([gap for one in answered for gap in one.itl_s]),
        e2e=Distribution.of([one.e2e_s for one in answered]),
        send_lag=Distribution.of([one.sent_s - one.scheduled_s for one in records]),
        errors=dict(Counter(one.error for one in records if one.error is not None)),
    )
