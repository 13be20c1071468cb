"""One measured load: a workload sent to a target, and what of it counts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from llmq.profiles.cost import dollars_per_million
from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.load.client import LoadClient
from llmq.profiles.load.generator import OnDone
from llmq.profiles.load.metrics import LoadSummary, RequestRecord, summarize
from llmq.profiles.load.pacing import Pacing
from llmq.profiles.load.prompts import prompt_maker
from llmq.profiles.load.saturation import Saturation
from llmq.profiles.load.server_metrics import PrefixCounters
from llmq.profiles.load.target import Target
from llmq.profiles.slo import Slo, Verdict


@dataclass(frozen=True)
class Workload:
    """The lengths of all requests in order, the first `num_warmup` of which are sent and not counted."""

    lengths: Sequence[Arrival]
    pacing: Pacing
    num_warmup: int = 0
    length_scale: float = 1.0  # that the lengths were scaled by: a Mooncake trace's blocks are scaled too


@dataclass(frozen=True)
class Goodput:
    """What was delivered within the SLO, a second of the measured time. Without an SLO: what was answered."""

    num_good: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float

    @classmethod
    def of(cls, good: Sequence[RequestRecord], duration_s: float) -> "Goodput":
        def rate(total: float) -> float:
            return total / duration_s if duration_s else 0.0

        return cls(
            num_good=len(good),
            requests_per_s=rate(len(good)),
            input_tokens_per_s=rate(sum(one.num_prompt_tokens for one in good)),
            output_tokens_per_s=rate(sum(one.num_output_tokens for one in good)),
        )

    def costs(self, price_per_hour: float) -> dict[str, float | None]:
        """$ per 10^6 tokens, each as if the machine were paid for that kind alone."""
        rates = {"input": self.input_tokens_per_s, "output": self.output_tokens_per_s}
        rates["total"] = sum(rates.values())
        return {kind: dollars_per_million(price_per_hour, rate) for kind, rate in rates.items()}


@dataclass(frozen=True)
class Measurement:
    """`records` and `arrivals` are in one order, the warm-up first. `num_cut`: requests that an interruption left
    without a record; the workload's lengths are of all."""

    workload: Workload
    arrivals: Sequence[Arrival]
    records: Sequence[RequestRecord]
    prefix_counters: PrefixCounters | None = None  # of /metrics, the warm-up included
    slo: Slo | None = None
    num_cut: int = 0

    @property
    def measured(self) -> Sequence[RequestRecord]:
        return self.records[self.workload.num_warmup :]

    @cached_property
    def summary(self) -> LoadSummary:
        return summarize(self.measured)

    @cached_property
    def goodput(self) -> Goodput:
        good = [one for one in self.measured if (one.error is None if self.slo is None else self.slo.is_met_by(one))]
        return Goodput.of(good, self.summary.duration_s)

    @cached_property
    def verdict(self) -> Verdict | None:
        return None if self.slo is None else self.slo.verdict(self.measured)

    @cached_property
    def saturation(self) -> Saturation | None:
        """None for a closed loop, which is as full as its users make it."""
        return Saturation.of(self.records, self.workload.num_warmup) if self.workload.pacing.is_open else None

    @property
    def is_saturated(self) -> bool:
        return self.saturation is not None and self.saturation.is_over

    @property
    def answered(self) -> list[tuple[Arrival, RequestRecord]]:
        """Measured and answered: what was asked and what came."""
        pairs = list(zip(self.arrivals, self.records, strict=True))[self.workload.num_warmup :]
        return [(arrival, record) for arrival, record in pairs if record.error is None]

    @property
    def num_ended_early(self) -> int:
        """Answers shorter than asked."""
        return sum(record.num_output_tokens < arrival.num_output_tokens for arrival, record in self.answered)

    @property
    def error_examples(self) -> dict[str, str]:
        """For each kind of error what the server said, once."""
        found: dict[str, str] = {}
        for one in self.measured:
            if one.error is not None and not found.get(one.error):
                found[one.error] = one.error_detail
        return found


async def measure(
    client: LoadClient,
    target: Target,
    workload: Workload,
    *,
    salt: str,
    slo: Slo | None = None,
    on_done: OnDone | None = None,
) -> Measurement:
    """Send `workload` to `target`. `salt`: see `prompt_maker`; another for each measurement of one server. Cancelled,
    it returns what was answered until then."""
    arrivals = workload.pacing.arrivals(workload.lengths)
    make_body = target.make_body(prompt_maker(target.prompts, salt, workload.length_scale))
    before = PrefixCounters.parse(await client.get_text("/metrics"))
    records = await workload.pacing.run(client, arrivals, make_body, path=target.path, on_done=on_done)
    done = [number for number, record in enumerate(records) if record is not None]
    if len(done) < len(records):
        warmup = sum(number < workload.num_warmup for number in done)
        kept = [arrivals[number] for number in done]
        cut = len(records) - len(done)
        return Measurement(
            replace(workload, num_warmup=warmup), kept, [records[number] for number in done], None, slo, cut
        )
    after = PrefixCounters.parse(await client.get_text("/metrics"))
    counters = after.since(before) if before and after else None
    return Measurement(workload, arrivals, records, counters, slo)


def cycled(lengths: Sequence[Arrival], count: int) -> list[Arrival]:
    """`count` of them, from the first again after the last."""
    return [lengths[number % len(lengths)] for number in range(count)]
