"""A bench as one HTML page with its plots, that opens anywhere and asks nobody."""

from collections.abc import Sequence
from importlib.resources import files

from llmq.profiles.load import plots
from llmq.profiles.load.measurement import Measurement

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # (columns, rows)


def render_page(
    *,
    title: str,
    remark: str,
    headline: str,
    shown: Measurement,
    latencies: Table,
    figures: Sequence[Sequence[str]],
    notes: Sequence[str],
    points: Sequence[Measurement] = (),
    point_table: Table | None = None,
) -> str:
    """`headline`: the verdict, or "". `shown` in full; `points` and `point_table`: of a sweep, all that it measured."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string((files(__package__) / "report_page" / "bench.html").read_text("utf-8"))
    safe = jinja2.utils.markupsafe.Markup
    over_time = [
        ("Time to first token of each request", plots.ttft_by_time(shown)),
        ("Requests under way", plots.in_flight(shown)),
        ("Output tokens a second", plots.token_rate(shown)),
        ("Latencies", plots.distributions(shown)),
    ]
    return template.render(
        title=title,
        remark=remark,
        headline=headline,
        load=str(shown.workload.pacing),
        latencies=latencies,
        figures=figures,
        notes=notes,
        point_table=point_table,
        point_plots=[(name, safe(svg)) for name, svg in plots.rates(points)] if points else [],
        plots=[(name, safe(svg)) for name, svg in over_time if svg],
    )
