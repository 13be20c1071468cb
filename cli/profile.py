"""`llmq profile`: how fast a model can at most be on a machine, and on this one how fast it is."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.cli.profile_facts import datasheet, decoder_work
from llmq.profiles.errors import InputError
from llmq.profiles.units import parse_tokens

if TYPE_CHECKING:
    from llmq.cli.profile_measure import MeasuredStep
    from llmq.profiles.latency_model import LatencyModel
    from llmq.profiles.roofline import DecoderWork, Machine, StepWork

app = typer.Typer(add_completion=False)

_SHOWN_OPERATIONS = 8


@dataclass(frozen=True)
class Row:
    """One step: its work, and what was measured of it, if it was."""

    name: str
    short_name: str  # of a table
    num_tokens: int  # that it brings
    step: "StepWork"
    measured: "MeasuredStep | None" = None
    expected_s: tuple[float, float, float] | None = None  # (least, expected, most) by the latency model
    experts_read: float | None = None  # share of all; None: the decoder has none

    def as_dict(self, machine: "Machine") -> dict[str, Any]:
        step, seconds = self.step, self.measured and self.measured.seconds
        floor_s = step.floor_s(machine)
        return {
            "step": self.name,
            "weight_bytes": step.weight_bytes,
            "kv_bytes": step.kv_bytes,
            "flops": step.flops,
            "memory_s": step.memory_s(machine),
            "compute_s": step.compute_s(machine),
            "floor_s": floor_s,
            "bound_by": "compute" if step.is_compute_bound(machine) else "memory",
            "tokens_per_s_at_most": self.num_tokens / floor_s,
            "experts_read": self.experts_read,
            "expected_s": self.expected_s and dict(zip(("low", "expected", "high"), self.expected_s, strict=True)),
            "measured_s": seconds,
            "floor_over_measured": seconds and floor_s / seconds,
            "operations": dict(self.measured.operations) if self.measured else None,
        }


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="Folder, config.json, .gguf file, hub id, or an alias.")],
    gpu: Annotated[
        str | None, typer.Option(help="A GPU by name (h100): the floor by its datasheet. Default: this machine's CPU.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences that decode together: 1,8,32.")] = "1,8,32",
    ctx: Annotated[str, typer.Option(help="Tokens that each has, and of a prefill: 512,8k (k = 1024).")] = "512",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of --gpu.")] = 1,
    weights: Annotated[str | None, typer.Option(help="As kv-budget's: bf16, fp8, int8, w4, w4g64, 40GiB.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32, fp8, int8 or int4.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads that this machine is measured with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The least time of a decode step and of a prefill: bytes over bandwidth, or FLOPs over peak, whichever is more.

    With --gpu from the datasheet and config.json alone, and what an engine is expected to take, as an interval. Without
    it bandwidth and FLOP/s of this machine's CPU are measured, and where the weights are at hand the engine's own steps
    too, and where their time went.
    """
    from llmq.profiles.checkpoint import find_model, has_weights

    batches = [_whole("--batch", one) for one in batch.split(",")]
    contexts = [parse_tokens(one) for one in ctx.split(",")]
    if gpu is None and tp > 1:
        raise InputError(f"--tp {tp}: of a --gpu; this machine is measured as one rank")
    if gpu is not None and threads is not None:
        raise InputError("--threads is of this machine, and --gpu names another: leave one away")
    with console.progress() as progress:
        path = find_model(model, config_only=gpu is not None, keep_blocks=True, progress=progress)
    work, kv_name, dtype = decoder_work(path, weights, kv_dtype, tp, is_run=gpu is None)
    if too_long := [one for one in contexts if one > work.architecture.max_position_embeddings]:
        raise InputError(
            f"--ctx {too_long[0]}: the model's own context is {work.architecture.max_position_embeddings:,} tokens"
        )
    if gpu is not None:
        from llmq.profiles.latency_model import LatencyModel, shipped_coefficients

        machine, engine = datasheet(gpu, weights), None
        model_of_time = LatencyModel(work, machine, shipped_coefficients())
    else:
        from llmq.cli import profile_measure as measure

        model_of_time = None
        console.status("llmq profile: measuring this machine")
        machine = measure.measure_machine(threads, dtype)
        engine = None
        if has_weights(path) and weights is None:
            console.status(f"llmq profile: loading {path}")
            engine = measure.load_engine(path, batch=max(batches), kv_dtype=kv_name, threads=threads)
    rows = _rows(work, batches, contexts, engine, model_of_time)
    crossings = {context: work.compute_bound_batch(machine, context) for context in contexts}
    if as_json:
        console.print_json(_as_json(model, machine, work, rows, crossings))
    else:
        _print(model, machine, work, rows, crossings)


def _rows(
    work: "DecoderWork", batches: list[int], contexts: list[int], engine: Any, model_of_time: "LatencyModel | None"
) -> list[Row]:
    from llmq.cli import profile_measure as measure

    def row(name: str, short: str, num_tokens: int, step: "StepWork", measured: "MeasuredStep | None") -> Row:
        experts = work.experts_read(num_tokens) if work.num_experts else None
        return Row(name, short, num_tokens, step, measured, model_of_time and model_of_time.interval_s(step), experts)

    rows = []
    for context in contexts:
        for batch in batches:
            found = engine and measure.measure_decode(engine, batch, context)
            name = f"decode, batch {batch}, {context:,} tokens"
            rows.append(row(name, f"{batch:,} × {context:,}", batch, work.decode(batch, context), found))
        found = engine and measure.measure_prefill(engine, context)
        name = f"prefill of {context:,} tokens"
        rows.append(row(name, f"prefill {context:,}", context, work.prefill(context), found))
    return rows


def _whole(flag: str, text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise InputError(f"{flag} {text}: whole numbers from 1 up, as 1,8,32")
    return int(text)


def _print(model: str, machine: "Machine", work: "DecoderWork", rows: list[Row], crossings: dict) -> None:
    console.heading(
        f"{model} on {machine.name}: {machine.bandwidth_bytes_per_s / 1e9:,.1f} GB/s, "
        f"{_tflops(machine.flops_per_s)} TFLOP/s ({machine.how})"
    )
    is_measured, is_expected = any(row.measured for row in rows), any(row.expected_s for row in rows)
    unit, unit_name = (2**30, "GiB") if max(row.step.weight_bytes for row in rows) >= 2**30 else (2**20, "MiB")
    columns = ["", f">weights + KV {unit_name}", *([">experts"] if work.num_experts else []), ">floor ms", "by"]
    columns += [">tokens/s at most"] if not is_expected else []
    columns += [">measured ms", ">floor / measured"] if is_measured else []
    columns += [">expected", ">80 % within"] if is_expected else []
    console.print_table(None, columns, [_cells(row, machine, unit) for row in rows])
    for row in rows:
        if row.measured and row.measured.operations:
            shown = row.measured.operations[:_SHOWN_OPERATIONS]
            console.print_text()
            cells = [[name, f"{share:.1%}"] for name, share in shown if share >= 0.005]
            console.print_table(f"Where the time of {row.name} went", ["", ">share"], cells)
    console.print_notes(_notes(work, crossings, is_measured, is_expected))


def _cells(row: Row, machine: "Machine", unit: int) -> list[str]:
    found = row.as_dict(machine)
    cells = [
        row.short_name,
        f"{found['weight_bytes'] / unit:,.1f} + {found['kv_bytes'] / unit:,.1f}",
        *([] if row.experts_read is None else [f"{row.experts_read:.0%}"]),
        _ms(found["floor_s"]),
        found["bound_by"],
    ]
    if row.expected_s:
        low, expected, high = row.expected_s
        return [*cells, _ms(expected), f"{_ms(low)} – {_ms(high)}"]
    cells.append(f"{found['tokens_per_s_at_most']:,.0f}")
    return [*cells, _ms(found["measured_s"]), f"{found['floor_over_measured']:.0%}"] if row.measured else cells


def _tflops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:,.0f}" if flops_per_s >= 1e14 else f"{flops_per_s / 1e12:.3g}"


def _ms(seconds: float) -> str:
    """Three figures of milliseconds."""
    ms = seconds * 1000
    return f"{ms:,.{max(0, 2 - int(math.log10(ms)) if ms >= 1 else 2)}f}"


def _notes(work: "DecoderWork", crossings: dict[int, int | None], is_measured: bool, is_expected: bool) -> list[str]:
    notes = ["A decode step is batch × tokens of each."]
    notes += [
        f"At {context:,} tokens a decode step is bound by memory "
        + ("in any batch: reading K and V takes longer than computing." if batch is None else f"below batch {batch:,}.")
        for context, batch in crossings.items()
    ]
    if work.num_experts:
        notes.append(
            f"{work.experts_per_token} of {work.num_experts} experts a token; the share that a step reads is that of a "
            "router that prefers none."
        )
    if work.ranks > 1:
        notes.append(
            f"For one of {work.ranks} ranks; what they say to each other is in what is expected, not the floor."
        )
    if is_expected:
        notes.append(
            "Expected: what engines lose on the way, fitted to published throughputs; of models that it was not fitted "
            "to, 80 % lie within."
        )
    if is_measured:
        notes.append("Measured: the fastest of several decode steps, one prefill; the shares are of one more step.")
    return notes


def _as_json(model: str, machine: "Machine", work: "DecoderWork", rows: list[Row], crossings: dict) -> dict[str, Any]:
    return {
        "model": model,
        "machine": machine.name,
        "bandwidth_bytes_per_s": machine.bandwidth_bytes_per_s,
        "flops_per_s": machine.flops_per_s,
        "how": machine.how,
        "tensor_parallel": work.ranks,
        "steps": [row.as_dict(machine) for row in rows],
        "compute_bound_batch": {str(context): batch for context, batch in crossings.items()},
    }
