"""quantization_report.html: the report as a page of its own, with plots, that opens anywhere and asks nobody."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from llmq.profiles.units import format_bytes, format_bytes_exact, format_share
from llmq.quantize.report import QuantizationReport
from llmq.quantize.report_plots import heat_map, paired_bars

REPORT_PAGE = "quantization_report.html"

_OUTPUT_ERROR = (
    "The error of each linear's output on the calibration tokens, as a share of its energy: E|W'x - Wx|² / E|Wx|² "
    "(by GPTQ over at most 256 of its rows, evenly spread)."
)
_WEIGHT_ERROR = "The error of each linear's weight, as a share of its energy: |W' - W|² / |W|²."


@dataclass(frozen=True)
class _Column:
    """A column of the table of linears: a field of LinearReport, shown where any linear has it."""

    field: str
    title: str
    meaning: str
    kind: str = "number"  # or "name", "bytes", "share", "count"

    @property
    def is_number(self) -> bool:
        return self.kind not in ("name", "word")


_COLUMNS = (
    _Column("name", "linear", "its name in the checkpoint", "name"),
    _Column("scheme", "scheme", "how it is stored", "word"),
    _Column("method", "method", "what chose its numbers", "word"),
    _Column("shape", "shape", "[outputs, inputs]", "word"),
    _Column("bytes_before", "before", "bytes as it was stored", "bytes"),
    _Column("bytes_after", "after", "bytes with its scales and zero points", "bytes"),
    _Column("output_error", "output error", _OUTPUT_ERROR, "share"),
    _Column("rtn_output_error", "rounding alone", "the same error by rounding to nearest, to the same scheme", "share"),
    _Column("weight_error", "weight error", _WEIGHT_ERROR, "share"),
    _Column("damping", "damping", "what was added to the diagonal of the Hessian, as a share of its mean"),
    _Column("saturated_share", "clipped", "weights outside the range that was kept", "share"),
    _Column("dead_inputs", "dead inputs", "input channels that no calibration token used", "count"),
    _Column("num_tokens", "tokens", "calibration tokens that its statistics were taken of", "count"),
    _Column("routed_tokens", "routed", "calibration tokens that the router sent to this expert", "count"),
)


def render_report(report: QuantizationReport) -> str:
    """The page: one HTML document without any outside asset."""
    import jinja2

    content = report.as_dict()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string((files(__package__) / "report_page" / "report.html").read_text("utf-8"))
    plot = jinja2.utils.markupsafe.Markup
    linears = content["linears"]
    error_field = "output_error" if any(one["output_error"] is not None for one in linears) else "weight_error"
    columns = [column for column in _COLUMNS if any(one.get(column.field) is not None for one in linears)]
    return template.render(
        title=f"Quantization report: {content['scheme']}",
        source=content["source"],
        scheme=content["scheme"],
        method=content["method"],
        versions=", ".join(f"{name} {version}" for name, version in content["versions"].items()),
        summary=_summary(content),
        proof=_proof(content.get("proof")),
        warnings=content["warnings"],
        error_meaning=_OUTPUT_ERROR if error_field == "output_error" else _WEIGHT_ERROR,
        worst_note=_worst(linears, error_field),
        error_range=_range(linears, error_field),
        error_map=plot(_error_map(linears, error_field)),
        bytes_chart=plot(_bytes_chart(linears)),
        bits_map=plot(_bits_map(linears)),
        columns=columns,
        rows=[[_cell(column, one.get(column.field)) for column in columns] for one in linears],
        left_alone=list(content["left_alone"].items()),
        scalings=[_scaling(one) for one in content["scalings"]],
        provenance=json.dumps(
            {name: content[name] for name in ("recipe", "settings", "group_size", "calibration")},
            indent=2,
            ensure_ascii=False,
        ),
    )


def _summary(content: dict[str, Any]) -> list[tuple[str, str]]:
    before, after = content["bytes_before"], content["bytes_after"]
    rows = [
        ("weights before", format_bytes_exact(before)),
        (
            "weights after",
            f"{format_bytes_exact(after)}, {after / before:.1%} (predicted {content['predicted_bytes']:,} B)",
        ),
        (
            "bits a weight",
            f"{content['bits_per_weight']:.3f} over all, {content['bits_per_quantized_weight']:.3f} in the "
            f"{len(content['linears'])} quantized linears",
        ),
    ]
    if content["loaders"]:
        rows.append(("loaded by", ", ".join(content["loaders"])))
    if calibration := content["calibration"]:
        amount = f"{calibration['num_tokens']:,} tokens in {calibration['num_samples']} samples"
        rows.append(("calibrated on", f"{amount} of {calibration['source']}"))
    if kv := content["recipe"].get("kv"):
        rows.append(("KV-cache", f"{kv}, a static scale for K and one for V of each layer"))
    rows.append(("time", f"{content['duration_s']:.1f} s"))
    return rows


def _proof(proof: dict[str, Any] | None) -> dict[str, Any] | None:
    """What `evals` measured on held-out text, where it did."""
    if not proof:
        return None
    before, after = proof["baseline"], proof["candidate"]
    return {
        "text": f"{proof['num_positions']:,} tokens of {proof['source']}, through llmq's own runtime.",
        "columns": ["original", "quantized", "change"],
        "rows": [
            (
                "token perplexity",
                f"{before['token_ppl']:.4f}",
                f"{after['token_ppl']:.4f}",
                f"{after['token_ppl'] / before['token_ppl'] - 1:+.2%}",
            ),
            ("mean KL divergence", "", f"{proof['mean_kl']:.5f}", "nats a token"),
            ("99 % of positions below", "", f"{proof['p99_kl']:.4f}", "nats"),
            ("same next token", "", f"{proof['top1_agreement']:.2%}", "greedy"),
        ],
    }


def _kind_and_layer(name: str) -> tuple[str, int]:
    """`model.layers.3.mlp.experts.7.up_proj` -> (`experts.up_proj`, 3): experts of a layer share a cell."""
    words = name.split(".")
    at = words.index("layers") if "layers" in words else -1
    rest = [word for word in words[at + 2 :] if not word.isdigit()]
    return ".".join(rest[-2:]) if "experts" in rest else rest[-1], int(words[at + 1])


def _error_map(linears: list[dict], field: str) -> str:
    worst: dict[tuple[str, int], tuple[float, str]] = {}
    for one in linears:
        cell, value = _kind_and_layer(one["name"]), one[field]
        if value is not None and value >= worst.get(cell, (-1.0, ""))[0]:
            worst[cell] = value, f"{one['name']}: {format_share(value)}, {one['scheme']}"
    values = {cell: value for cell, (value, _) in _by_kind(worst)}
    return heat_map(values, {cell: hint for cell, (_, hint) in worst.items()})


def _bits_map(linears: list[dict]) -> str:
    """Bits a weight of each cell, where they differ between linears: what a search or a recipe chose."""
    bits: dict[tuple[str, int], tuple[float, str]] = {}
    for one in linears:
        value = one["bytes_after"] * 8 / (one["shape"][0] * one["shape"][1])
        bits[_kind_and_layer(one["name"])] = value, f"{one['name']}: {value:.2f} bits, {one['scheme']}"
    if len({one["scheme"] for one in linears}) == 1:
        return ""
    values = {cell: value for cell, (value, _) in _by_kind(bits)}
    return heat_map(values, {cell: hint for cell, (_, hint) in bits.items()}, logarithmic=False)


def _by_kind(cells: dict[tuple[str, int], Any]) -> list[tuple[tuple[str, int], Any]]:
    order = list(dict.fromkeys(kind for kind, _ in cells))
    return sorted(cells.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))


def _bytes_chart(linears: list[dict]) -> str:
    totals: dict[str, list[int]] = {}
    for one in linears:
        total = totals.setdefault(_kind_and_layer(one["name"])[0], [0, 0])
        total[0] += one["bytes_before"]
        total[1] += one["bytes_after"]
    return paired_bars([(kind, b, a, f"{format_bytes(b)} → {format_bytes(a)}") for kind, (b, a) in totals.items()])


def _range(linears: list[dict], field: str) -> str:
    values = [one[field] for one in linears if one[field]]
    return f"{format_share(min(values))} to {format_share(max(values))}" if values else "all zero"


def _worst(linears: list[dict], field: str, most: int = 3) -> str:
    ranked = sorted((one for one in linears if one[field] is not None), key=lambda one: -one[field])[:most]
    return (
        "Largest: " + ", ".join(f"{one['name']} {format_share(one[field])}" for one in ranked) + "." if ranked else ""
    )


def _cell(column: _Column, value: Any) -> dict[str, Any]:
    if value is None:
        return {"text": "", "style": "n" if column.is_number else column.kind, "key": None}
    shown = {
        "name": lambda v: v,
        "word": lambda v: "×".join(map(str, v)) if isinstance(v, list | tuple) else str(v),
        "bytes": lambda v: f"{v:,}",
        "count": lambda v: f"{v:,}",
        "share": format_share,
        "number": lambda v: f"{v:.4g}",
    }[column.kind](value)
    style = "n" if column.is_number else column.kind
    return {"text": shown, "style": style, "key": value if column.is_number else None}


def _scaling(one: dict[str, Any]) -> dict[str, str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return {
        "source": one["source"],
        "linears": ", ".join(name.rsplit(".", 1)[-1] for name in one["linears"]),
        "alpha": number(one["alpha"], ".2f"),
        "before": number(one["unscaled_error"], ".3%"),
        "after": number(one["error"], ".3%"),
        "note": one["skipped"] or _note(one),
    }


def _note(scaling: dict[str, Any]) -> str:
    if scaling["alpha"] is None:
        return "no scaling was better than any"
    sharing = scaling.get("num_sharing", 1)
    return f"{sharing} query heads share the scales of the KV head they read" if sharing > 1 else ""
