"""What a load run measured: one record a request, and the percentiles that servers are compared by.

Times are seconds of one monotonic clock. Latency counts from when a request was due, not from when it was sent: a
generator that falls behind would otherwise hide the very waiting it causes (coordinated omission).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class RequestRecord:
    """One request as its client saw it. Without `error`, it was answered to the end and its tokens are known."""

    scheduled_s: float
    sent_s: float
    token_times_s: tuple[float, ...] = ()  # of each event that brought text; one may bring several tokens
    event_tokens: tuple[int, ...] = ()  # how many each of them brought, where the server says so in every event
    end_s: float = 0.0  # of the event that ended the answer, or of the error
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # "status 429", "timed out", …: in words that can be counted
    error_detail: str = ""  # what the server said of it

    @property
    def ttft_s(self) -> float | None:
        """Time to first token. None where none came."""
        return self.token_times_s[0] - self.scheduled_s if self.token_times_s else None

    @property
    def e2e_s(self) -> float:
        """From when it was due to the end of the answer."""
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (E2E - TTFT) / (N - 1). None for a single token."""
        if self.num_output_tokens < 2 or not self.token_times_s:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def normalized_s(self) -> float | None:
        """Normalized latency: E2E / N (Orca, OSDI '22). None without a token."""
        return self.e2e_s / self.num_output_tokens if self.num_output_tokens else None

    @property
    def tokens_by_event(self) -> tuple[int, ...]:
        """Tokens of each event that brought text: as the server says, else its total spread evenly over them."""
        if self.event_tokens:
            return self.event_tokens
        events, tokens = len(self.token_times_s), self.num_output_tokens
        return tuple((number + 1) * tokens // events - number * tokens // events for number in range(events))

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies, one for each token after the first event: an event of k tokens that comes a gap g
        after the last one is k latencies of g / k. They sum to the time from the first event to the last."""
        latencies, last_s = [], self.token_times_s[0] if self.token_times_s else 0.0
        for time_s, count in list(zip(self.token_times_s, self.tokens_by_event, strict=True))[1:]:
            if count:
                latencies += [(time_s - last_s) / count] * count
                last_s = time_s
        return latencies


@dataclass(frozen=True)
class Distribution:
    count: int
    mean: float
    percentiles: dict[int, float]
    highest: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Distribution | None":
        """Of the values that are not None; None where there is none. Percentiles are linear between the two nearest."""
        values = [value for value in values if value is not None]
        if not values:
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
    normalized: Distribution | None
    send_lag: Distribution | None  # how late the generator itself was
    errors: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    # Answers with as many events as tokens, give or take a last token without text, or with counts in every event:
    # only for these is ITL not an even spread.
    num_itl_exact: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.duration_s if self.duration_s else 0.0

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
        ttft=Distribution.of([one.ttft_s for one in answered]),
        tpot=Distribution.of([one.tpot_s for one in answered]),
        itl=Distribution.of([latency for one in answered for latency in one.itl_s]),
        e2e=Distribution.of([one.e2e_s for one in answered]),
        normalized=Distribution.of([one.normalized_s for one in answered]),
        send_lag=Distribution.of([one.sent_s - one.scheduled_s for one in records]),
        errors=dict(Counter(one.error for one in records if one.error is not None)),
        finish_reasons=dict(Counter(one.finish_reason or "none" for one in answered)),
        num_itl_exact=sum(
            bool(one.event_tokens) or 0 <= one.num_output_tokens - len(one.token_times_s) <= 1 for one in answered
        ),
    )
