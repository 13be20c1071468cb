"""The plots of a bench report: latencies as they came, their distributions, the server's load, a sweep's rates."""

from collections.abc import Sequence
from itertools import accumulate

from llmq.profiles.load.measurement import Measurement
from llmq.profiles.svg import Series, plot

_COLORS = {"ttft": "--bar", "tpot": "--green", "itl": "--violet", "e2e": "--orange"}
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
_BINS = 60
_MOST_POINTS = 2_000  # of a distribution's line


def ttft_by_time(one: Measurement) -> str:
    """A dot for each request: when it was due, and how long its first token took."""
    start_s = _start_s(one)
    groups = {"measured": ("--bar", []), "warm-up": ("--ghost", []), "error": ("--red", [])}
    for number, record in enumerate(one.records):
        kind = "error" if record.error else "warm-up" if number < one.workload.num_warmup else "measured"
        waited_s = record.ttft_s if record.ttft_s is not None else record.e2e_s
        groups[kind][1].append((record.scheduled_s - start_s, waited_s * 1000))
    series = [Series(name, points, color, "dots") for name, (color, points) in groups.items() if points]
    return plot(
        series, title="TTFT by time", x_label="s, when it was due", y_label="TTFT, ms", limits=_limits(one, "ttft")
    )


def in_flight(one: Measurement) -> str:
    """Requests due and not yet answered."""
    start_s = _start_s(one)
    changes = sorted(
        [(record.scheduled_s, 1) for record in one.records] + [(record.end_s, -1) for record in one.records]
    )
    counts = accumulate(change for _, change in changes)
    points = [(time_s - start_s, count) for (time_s, _), count in zip(changes, counts, strict=True)]
    return plot([Series("", points, style="steps")], title="requests under way", x_label="s", y_label="under way")


def token_rate(one: Measurement) -> str:
    """Output tokens a second, as they came."""
    start_s = _start_s(one)
    came = [
        (time_s - start_s, count)
        for record in one.records
        if record.error is None
        for time_s, count in zip(record.token_times_s, record.tokens_by_event, strict=True)
    ]
    if not came:
        return ""
    width_s = max(time_s for time_s, _ in came) / _BINS or 1.0
    totals = [0] * _BINS
    for time_s, count in came:
        totals[min(int(time_s / width_s), _BINS - 1)] += count
    points = [(number * width_s, total / width_s) for number, total in enumerate(totals)]
    points.append((_BINS * width_s, points[-1][1]))  # as long as the others
    return plot([Series("", points, style="steps")], title="output tokens a second", x_label="s", y_label="tokens/s")


def distributions(one: Measurement) -> str:
    """The share of values at most as large, for each latency."""
    answered = [record for record in one.measured if record.error is None]
    values = {
        "ttft": [record.ttft_s for record in answered],
        "tpot": [record.tpot_s for record in answered],
        "itl": [latency for record in answered for latency in record.itl_s],
        "e2e": [record.e2e_s for record in answered],
    }
    series = []
    for name, found in values.items():
        ordered = sorted(value for value in found if value is not None and value > 0)
        every = max(1, len(ordered) // _MOST_POINTS)
        points = [(value * 1000, 100 * (number + 1) / len(ordered)) for number, value in enumerate(ordered)][::every]
        if points:
            series.append(Series(_NAMES[name], points, _COLORS[name]))
    return plot(series, title="latencies", x_label="ms, logarithmic", y_label="% of values at most", log_x=True)


def rates(measurements: Sequence[Measurement]) -> list[tuple[str, str]]:
    """(what, plot) over the rates of a sweep: what kept the SLO, and p99 of the latencies that it limits."""
    points = sorted(measurements, key=lambda one: one.workload.pacing.rate_per_s)
    kept = [(one.workload.pacing.rate_per_s, 100 * one.goodput.num_good / one.summary.num_requests) for one in points]
    wanted = points[0].slo.percentile
    plots = [("Requests that kept the SLO", _over_rates(kept, "%", [(f"{wanted:g} %", wanted)]))]
    for name in points[0].slo.limits_s:
        values = [
            (one.workload.pacing.rate_per_s, found.percentiles[99] * 1000)
            for one in points
            if (found := getattr(one.summary, name)) is not None
        ]
        plots.append((f"p99 {_NAMES[name]}", _over_rates(values, "ms", _limits(points[0], name))))
    return plots


def _over_rates(points: list[tuple[float, float]], y_label: str, limits: list[tuple[str, float]]) -> str:
    series = [Series("", points), Series("", points, style="dots")]
    return plot(series, title=y_label, x_label="requests/s, logarithmic", y_label=y_label, limits=limits, log_x=True)


def _limits(one: Measurement, name: str) -> list[tuple[str, float]]:
    limit_s = one.slo.limits_s.get(name) if one.slo is not None else None
    return [] if limit_s is None else [(f"SLO {limit_s * 1000:g} ms", limit_s * 1000)]


def _start_s(one: Measurement) -> float:
    return min((record.scheduled_s for record in one.records), default=0.0)
