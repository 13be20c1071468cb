"""What `llmq bench` prints and writes."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.cli import console
from llmq.profiles.errors import InputError
from llmq.profiles.units import format_count

if TYPE_CHECKING:
    from llmq.profiles.load.measurement import Measurement, Workload
    from llmq.profiles.load.target import Target
    from llmq.profiles.load.utilization import Utilization


@dataclass(frozen=True)
class Result:
    """All that was measured, in the order in which it was; a sweep has several, and the highest rate it found."""

    target: str
    found: "Target"
    measurements: "list[Measurement]"
    sweeps: bool
    best_rate: float | None
    price_per_hour: float | None
    utilization: "Utilization | None" = None

    @property
    def shown(self) -> "Measurement":
        """The one of which all figures are shown: a sweep's best, or its last where none kept the SLO."""
        best = [one for one in self.measurements if self.sweeps and one.workload.pacing.rate_per_s == self.best_rate]
        return (best or self.measurements)[-1]

    def as_dict(self) -> dict[str, Any]:
        from llmq.profiles.load import report

        dicts = [report.as_dict(one, self.price_per_hour, self.utilization) for one in self.measurements]
        return {
            "target": self.target,
            "model": self.found.model,
            "endpoint": self.found.path,
            "prompts": str(self.found.prompts),
            "ignore_eos": self.found.ignores_eos,
            "num_probes": self.found.num_probes,
            **({"best_rate": self.best_rate, "points": dicts} if self.sweeps else dicts[0]),
            "notes": report.notes(self.shown, self.utilization),
        }


def target_line(url: str, target: "Target") -> str:
    ignores = "ignore_eos" if target.ignores_eos else "ignore_eos is not taken: answers may end early"
    return f"llmq bench: {target.model} at {url}{target.path} · {target.prompts} · {ignores}"


def workload_line(workload: "Workload") -> str:
    count = len(workload.lengths) - workload.num_warmup
    return f"llmq bench: {workload.pacing} · {format_count(count, 'request')} after {workload.num_warmup} of warm-up"


def point_line(one: "Measurement") -> str:
    rate, count, kept, *_, verdict = _point(one)
    return f"llmq bench: {rate} requests/s: {kept} of {count} requests kept the SLO: {verdict}"


def nothing_answered(one: "Measurement") -> str:
    kinds = ", ".join(
        f"{count} × {kind}" + (f" ({one.error_examples[kind]})" if one.error_examples.get(kind) else "")
        for kind, count in one.summary.errors.items()
    )
    return f"not one of {format_count(one.summary.num_requests, 'request')} was answered: {kinds}"


def check_writable(*paths: Path | None) -> None:
    """Before an hour of load, not after it. Raises InputError."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'no such folder'}")


def write_csv(result: Result, path: Path | None) -> None:
    if path is None:
        return
    from llmq.profiles.load.report import CSV_COLUMNS, csv_rows

    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for one in result.measurements:
            writer.writerows(csv_rows(one))
    console.status(f"llmq bench: a row for each request in {path}")


def write_page(result: Result, path: Path | None) -> None:
    if path is None:
        return
    from llmq.profiles.load import report
    from llmq.profiles.load.page import render_page

    one = result.shown
    page = render_page(
        title=f"llmq bench: {result.found.model}",
        remark=f"{result.target} · {result.found.path} · {result.found.prompts}",
        headline=_headline(result),
        shown=one,
        latencies=_latencies(one),
        figures=figures(result),
        notes=report.notes(one, result.utilization),
        points=result.measurements if result.sweeps else (),
        point_table=_points(result) if result.sweeps else None,
    )
    path.write_text(page, encoding="utf-8")
    console.status(f"llmq bench: a page with plots in {path}")


def show(result: Result, *, as_json: bool) -> None:
    from llmq.profiles.load import report

    if as_json:
        console.print_json(result.as_dict())
        return
    one = result.shown
    if result.sweeps:
        console.print_table(f"Rates tried for {one.slo}", *_points(result))
        console.heading(_best(result))
        console.print_text()
    console.print_table(str(one.workload.pacing), *_latencies(one))
    console.print_text()
    console.print_table(None, ["", ">"], figures(result))
    console.print_notes(report.notes(one, result.utilization))


def _headline(result: Result) -> str:
    if result.sweeps:
        return _best(result)
    one = result.shown
    return "" if one.slo is None else f"{one.slo}: {_kept(one)}"


def _kept(one: "Measurement") -> str:
    return f"{one.goodput.num_good / one.summary.num_requests:.1%}: {one.verdict.value}"


def _best(result: Result) -> str:
    found = "no rate that was tried keeps it" if result.best_rate is None else f"{result.best_rate:.3g} requests/s"
    return f"Highest rate that keeps {result.shown.slo}: {found}"


def _points(result: Result) -> tuple[list[str], list[list[str]]]:
    points = sorted(result.measurements, key=lambda one: one.workload.pacing.rate_per_s)
    columns = [">requests/s", ">requests", ">kept the SLO", ">p99 TTFT", ">p99 TPOT", "verdict"]
    return columns, [_point(one) for one in points]


def _point(one: "Measurement") -> list[str]:
    summary = one.summary
    share = one.goodput.num_good / summary.num_requests
    verdict = "FAIL, over-saturated" if one.is_saturated else one.verdict.value
    return [
        f"{one.workload.pacing.rate_per_s:.3g}",
        f"{summary.num_requests:,}",
        f"{share:.1%}",
        *(ms(found.percentiles[99]) if found else "" for found in (summary.ttft, summary.tpot)),
        verdict,
    ]


def _latencies(one: "Measurement") -> tuple[list[str], list[list[str]]]:
    from llmq.profiles.load.metrics import PERCENTILES
    from llmq.profiles.load.report import LATENCIES

    rows = []
    for name in LATENCIES:
        if found := getattr(one.summary, name):
            points = [ms(found.percentiles[point]) for point in PERCENTILES]
            rows.append([_NAMES[name], f"{found.count:,}", ms(found.mean), *points, ms(found.highest)])
    return ["from when each was due", ">values", ">mean", *(f">p{point}" for point in PERCENTILES), ">highest"], rows


_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "normalized": "E2E / tokens"}


def figures(result: Result) -> list[list[str]]:
    """(what, value) of everything but the latencies."""
    from llmq.profiles.load.report import as_dict

    one, summary = result.shown, result.shown.summary
    found = as_dict(one, result.price_per_hour, result.utilization)
    lengths, cache = found["lengths"], found["prefix_cache"]
    rows = [
        ["requests measured (warm-up before them)", f"{summary.num_requests:,} ({one.workload.num_warmup})"],
        ["  answered", f"{summary.num_answered:,}"],
        *([f"  {_error_name(one, kind)}", f"{count:,}"] for kind, count in summary.errors.items()),
        ["from the first one due to the last answer", console.format_duration(summary.duration_s)],
        ["requests/s", f"{summary.requests_per_s:.3g}"],
        ["output tokens/s", f"{summary.output_tokens_per_s:,.1f}"],
        ["input and output tokens/s", f"{summary.prompt_tokens_per_s + summary.output_tokens_per_s:,.1f}"],
        ["prompt tokens, mean (asked)", _of_asked(lengths, "prompt_tokens")],
        ["output tokens, mean (asked)", _of_asked(lengths, "output_tokens")],
    ]
    if one.slo is not None:
        good = one.goodput
        rows += [
            [f"kept {one.slo}", _kept(one)],
            ["goodput: requests/s", f"{good.requests_per_s:.3g}"],
            ["goodput: output tokens/s", f"{good.output_tokens_per_s:,.1f}"],
        ]
    if found["dollars_per_million_tokens"]:
        at = "at goodput" if one.slo is not None else "as answered"
        costs = found["dollars_per_million_tokens"].items()
        rows += [
            [f"$ a million {kind} tokens, {at}", "none came" if cost is None else f"{cost:,.4g}"]
            for kind, cost in costs
        ]
    rows.append(["prefix-cache hits, by usage", _share(cache["hit_rate_by_usage"])])
    if cache["hit_rate_by_metrics"] is not None:
        rows.append(["prefix-cache hits, by /metrics (warm-up too)", _share(cache["hit_rate_by_metrics"])])
    if found["mfu"] is not None:
        rows.append([f"MFU ({result.utilization})", f"{found['mfu']:.3%}"])
    return rows


def _error_name(one: "Measurement", kind: str) -> str:
    detail = one.error_examples.get(kind, "").replace("\n", " ")
    return f"{kind}: {detail[:80]}" if detail else kind


def _of_asked(lengths: dict[str, Any], name: str) -> str:
    if lengths[name] is None:
        return ""
    return f"{lengths[name]:,.1f} ({lengths[f'asked_{name}']:,.1f})"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def ms(seconds: float) -> str:
    """With three digits that count."""
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"
