"""What a bench says of a measurement: one dictionary for --json and the page, rows for --csv, remarks for people."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.load.measurement import Measurement
from llmq.profiles.load.metrics import PERCENTILES, Distribution, RequestRecord
from llmq.profiles.load.utilization import Utilization

LATENCIES = ("ttft", "tpot", "itl", "e2e", "normalized")
MEANINGS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first: (E2E - TTFT) / (N - 1)",
    "itl": "between tokens",
    "e2e": "to the last token",
    "normalized": "E2E / N",
}

CSV_COLUMNS = (
    *("load", "number", "warmup", "scheduled_s", "sent_s", "ttft_s", "tpot_s", "e2e_s", "asked_prompt_tokens"),
    *("prompt_tokens", "cached_tokens", "asked_output_tokens", "output_tokens", "finish_reason", "error"),
)


def as_dict(
    one: Measurement, price_per_hour: float | None = None, utilization: Utilization | None = None
) -> dict[str, Any]:
    """Seconds, tokens, dollars; latencies with mean, percentiles, highest and the number of values."""
    summary, pacing = one.summary, one.workload.pacing
    return {
        "load": str(pacing),
        "requests_per_s_offered": _finite(getattr(pacing, "rate_per_s", None)),
        "num_warmup": one.workload.num_warmup,
        "num_requests": summary.num_requests,
        "num_answered": summary.num_answered,
        "num_cut": one.num_cut,
        "errors": summary.errors,
        "error_examples": one.error_examples,
        "duration_s": summary.duration_s,
        "latency_s": {name: _distribution(getattr(summary, name)) for name in LATENCIES},
        "send_lag_s": _distribution(summary.send_lag),
        "requests_per_s": summary.requests_per_s,
        "prompt_tokens_per_s": summary.prompt_tokens_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "lengths": _lengths(one.answered),
        "num_ended_early": one.num_ended_early,
        "finish_reasons": summary.finish_reasons,
        "slo": None if one.slo is None else str(one.slo),
        "verdict": None if one.verdict is None else one.verdict.value,
        "goodput": asdict(one.goodput),
        "price_per_hour": price_per_hour,
        "dollars_per_million_tokens": None if price_per_hour is None else one.goodput.costs(price_per_hour),
        "prefix_cache": _prefix_cache(one),
        "saturation": None if one.saturation is None else {**asdict(one.saturation), "is_over": one.is_saturated},
        "mfu": None if utilization is None else utilization.mfu(one),
    }


def _finite(rate: float | None) -> float | None:
    """JSON has no infinity."""
    return None if rate is None or math.isinf(rate) else rate


def _distribution(found: Distribution | None) -> dict[str, Any] | None:
    if found is None:
        return None
    points = {f"p{point}": found.percentiles[point] for point in PERCENTILES}
    return {"count": found.count, "mean": found.mean, **points, "highest": found.highest}


def _lengths(answered: Sequence[tuple[Arrival, RequestRecord]]) -> dict[str, Any]:
    """Means over the answered requests."""

    def mean(values: list[int]) -> float | None:
        return sum(values) / len(values) if values else None

    return {
        "asked_prompt_tokens": mean([arrival.num_prompt_tokens for arrival, _ in answered]),
        "prompt_tokens": mean([record.num_prompt_tokens for _, record in answered]),
        "asked_output_tokens": mean([arrival.num_output_tokens for arrival, _ in answered]),
        "output_tokens": mean([record.num_output_tokens for _, record in answered]),
    }


def _prefix_cache(one: Measurement) -> dict[str, Any]:
    """Shares of prompt tokens: by the usage of the answers, and by the server's counters (the warm-up included)."""
    summary, counters = one.summary, one.prefix_counters
    return {
        "hit_rate_by_usage": summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else None,
        "hit_rate_by_metrics": None if counters is None else counters.hit_rate,
    }


def csv_rows(one: Measurement) -> list[list[Any]]:
    """A row for each request, the warm-up too; times count from the first one due."""
    start_s = min((record.scheduled_s for record in one.records), default=0.0)
    rows = []
    for number, (arrival, record) in enumerate(zip(one.arrivals, one.records, strict=True)):
        is_whole = record.error is None
        rows.append(
            [
                str(one.workload.pacing),
                number,
                int(number < one.workload.num_warmup),
                _rounded(record.scheduled_s - start_s),
                _rounded(record.sent_s - start_s),
                _rounded(record.ttft_s),
                _rounded(record.tpot_s if is_whole else None),
                _rounded(record.e2e_s if is_whole else None),
                arrival.num_prompt_tokens,
                record.num_prompt_tokens,
                record.num_cached_tokens,
                arrival.num_output_tokens,
                record.num_output_tokens,
                record.finish_reason or "",
                record.error or "",
            ]
        )
    return rows


def _rounded(seconds: float | None) -> Any:
    return "" if seconds is None else round(seconds, 6)


def notes(one: Measurement, utilization: Utilization | None = None) -> list[str]:
    """What a reader must know before believing the figures."""
    found = [note for rule in _RULES if (note := rule(one))]
    return found if utilization is not None else [*found, _NO_MFU]


def _saturation_note(one: Measurement) -> str | None:
    found = one.saturation
    if not one.is_saturated:
        return None
    ttft = (
        f" and TTFT's median rose from {found.ttft_begin_s:.3f} s to {found.ttft_end_s:.3f} s"
        if found.ttft_end_s is not None and found.ttft_begin_s is not None
        else ""
    )
    return (
        f"OVER-SATURATED: {found.num_sent} requests came in {found.window_s:.1f} s and {found.num_finished} were "
        f"finished; {found.in_flight_begin} were under way at the beginning, {found.in_flight_end} at the end{ttft}. "
        "The latencies grow with the length of the run: a lower rate, or read only the throughput."
    )


def _steady_note(one: Measurement) -> str | None:
    found, e2e = one.saturation, one.summary.e2e
    if found is None or e2e is None or one.is_saturated or found.window_s >= 2 * e2e.percentiles[50]:
        return None
    return (
        f"All requests came within {found.window_s:.1f} s and an answer takes {e2e.percentiles[50]:.1f} s: the server "
        "did not reach a steady state. More requests (--requests), or --duration."
    )


def _tail_note(one: Measurement) -> str | None:
    count = one.summary.num_answered
    return f"p99 of {count} requests is little more than the largest: 100 and more tell." if count < 100 else None


def _length_note(one: Measurement) -> str | None:
    if not one.num_ended_early:
        return None
    return f"{one.num_ended_early} answers ended before the length asked for: TPOT and throughput are of shorter ones."


def _prompt_note(one: Measurement) -> str | None:
    asked = sum(arrival.num_prompt_tokens for arrival, _ in one.answered)
    came = one.summary.prompt_tokens
    if not asked or abs(came / asked - 1) < 0.05:
        return None
    return (
        f"Prompts were {abs(came / asked - 1):.0%} {'longer' if came > asked else 'shorter'} than asked, on average: "
        "they are made of words, to which the server adds tokens of its own."
    )


def _itl_note(one: Measurement) -> str | None:
    spread = one.summary.num_answered - one.summary.num_itl_exact
    if not spread:
        return None
    return (
        f"In {spread} of {one.summary.num_answered} answers events were fewer or more than tokens and did not say how "
        "many they brought: ITL takes the tokens as spread evenly over the events."
    )


def _lag_note(one: Measurement) -> str | None:
    lag, ttft = one.summary.send_lag, one.summary.ttft
    if lag is None or ttft is None or lag.percentiles[99] < max(0.01, 0.05 * ttft.percentiles[50]):
        return None
    return (
        f"This client sent up to {lag.highest * 1000:.0f} ms late (p99 {lag.percentiles[99] * 1000:.0f} ms): that is "
        "in the latencies. It, or the machine, is too busy for this rate."
    )


_NO_MFU = "MFU is left out: it needs the model and the device's peak, which a server does not tell (--gpu, --facts)."


def _error_note(one: Measurement) -> str | None:
    errors = one.summary.num_requests - one.summary.num_answered
    return f"{errors} of {one.summary.num_requests} requests were not answered." if errors else None


def _cut_note(one: Measurement) -> str | None:
    if not one.num_cut:
        return None
    return (
        f"Interrupted: {one.num_cut} of {len(one.records) + one.num_cut} requests were not answered by then and are "
        "left out, the slow ones among them."
    )


_RULES = (
    _cut_note,
    _saturation_note,
    _error_note,
    _steady_note,
    _length_note,
    _prompt_note,
    _lag_note,
    _itl_note,
    _tail_note,
)
