"""What `llmq plan` says of its predictions: a table for people, a dictionary for `--json`."""

from typing import TYPE_CHECKING, Any

from llmq.cli import console

if TYPE_CHECKING:
    from llmq.profiles.plan import Lengths, Prediction
    from llmq.profiles.slo import Slo


def print_plan(model: str, predictions: "list[Prediction]", lengths: "Lengths", slo: "Slo", top: int) -> None:
    """The table of the first `top` that fit, and its remarks, to stdout."""
    from llmq.profiles.plan import Outlook

    console.heading(
        f"{model}: {slo}; requests of {lengths.source}"
        + ("" if len(lengths.requests) == 1 else f" (on average {lengths.prompt:,} and {lengths.output:,} tokens)")
    )
    fitting = [one for one in predictions if one.outlook is not Outlook.NO_ROOM]
    columns = ["", "GPU", "weights, KV", ">batch", ">TTFT ms", ">TPOT ms", ">tokens/s", ">$/M"]
    console.print_table(None, columns, [_cells(one) for one in fitting[:top]])
    console.print_notes(_notes(predictions, len(fitting), top))


def _cells(one: "Prediction") -> list[str]:
    way, dollars = one.candidate, one.dollars_per_million()
    return [
        one.outlook.value,
        f"{way.ranks}×{way.device.name}",
        f"{way.weights}, {way.kv_dtype}",
        f"{one.batch:,}",
        _range(one.latencies_s["ttft"]),
        _range(one.latencies_s["tpot"]),
        f"{one.output_tokens_per_s:,.0f}",
        "" if dollars is None else f"{dollars['output']:.2f}",
    ]


def _range(interval: tuple[float, float, float]) -> str:
    low, _, high = (1000 * one for one in interval)
    places = 0 if high >= 100 else 1
    return f"{low:,.{places}f}–{high:,.{places}f}"


def _notes(predictions: "list[Prediction]", num_fitting: int, top: int) -> list[str]:
    from llmq.profiles.latency_model import shipped_coefficients
    from llmq.profiles.plan import Outlook

    lost = shipped_coefficients()
    names = sorted({one.candidate.device.name for one in predictions if one.candidate.price_per_hour is None})
    prices = {one.candidate.device.name: one.candidate for one in predictions if one.candidate.price_per_hour}
    notes = []
    if num_fitting > top:
        counts = {outlook: sum(one.outlook is outlook for one in predictions) for outlook in Outlook}
        said = ", ".join(f"{count} {outlook.value}" for outlook, count in counts.items() if count)
        notes.append(f"The first {top} of {len(predictions)} ways ({said}): --top {num_fitting} shows all that fit.")
    elif num_fitting < len(predictions):
        notes.append(f"{len(predictions) - num_fitting} of {len(predictions)} ways have no room for one request.")
    notes.append(
        "Predicted, not measured: the intervals hold 80 % of published throughputs of models that the model of time "
        f"was not fitted to ({lost.low:.2f} to {lost.high:.2f} times what is expected). The batch is the largest that "
        "keeps the SLO; TTFT is that of the SLO's share of requests, TPOT that of the mean one."
    )
    notes.append("$/M: dollars for a million output tokens, the GPUs paid for them alone.")
    for name, way in prices.items():
        source = f" ({way.device.price_source})" if way.price_per_hour == way.device.price_per_hour else ""
        notes.append(f"{name}: ${way.price_per_hour:.2f} an hour{source}.")
    notes.append("What a format costs in quality is not predicted: --measure, or llmq eval OUT --baseline MODEL.")
    if names:
        notes.append(f"No price is known of {', '.join(names)}: --price-per-hour.")
    return notes


def as_dict(one: "Prediction") -> dict[str, Any]:
    way = one.candidate
    return {
        "verdict": one.outlook.value,
        "gpu": way.device.name,
        "tensor_parallel": way.ranks,
        "weights": way.weights,
        "weight_bytes": way.weight_bytes,
        "kv_dtype": way.kv_dtype,
        "batch": one.batch,
        "latency_s": {
            name: dict(zip(("low", "expected", "high"), interval, strict=True))
            for name, interval in one.latencies_s.items()
        },
        "output_tokens_per_s": one.output_tokens_per_s,
        "input_tokens_per_s": one.input_tokens_per_s,
        "price_per_hour": way.price_per_hour,
        "dollars_per_million_tokens": one.dollars_per_million(),
    }
