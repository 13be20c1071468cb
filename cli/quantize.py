"""`llmq quantize`: a model -> the same model in 4 or 8 bits, with a report of what that did to each layer."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.cli.quantize_proof import print_proof, prove
from llmq.cli.quantize_search import Search
from llmq.profiles.errors import InputError

if TYPE_CHECKING:
    from llmq.quantize.bit_search import Goal, SearchSpace
    from llmq.quantize.calibration import CalibrationSet, Texts
    from llmq.quantize.preflight import Plan
    from llmq.quantize.recipe import Recipe
    from llmq.quantize.report import QuantizationReport

app = typer.Typer(add_completion=False)

DEFAULT_SAMPLES, DEFAULT_SEQ_LEN = 128, 2048


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or smollm2-135m.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make: it appears whole or not at all.")],
    awq: Annotated[bool, typer.Option("--awq", help="Weights scaled by what activates them.")] = False,
    gptq: Annotated[bool, typer.Option("--gptq", help="Weights whose rounding errors are compensated.")] = False,
    best: Annotated[
        bool, typer.Option("--best", help="For each layer the better of both, in both their times.")
    ] = False,
    smoothquant: Annotated[bool, typer.Option("--smoothquant", help="INT8 weights and activations.")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="FP8 E4M3 weights and activations.")] = False,
    rtn: Annotated[bool, typer.Option("--rtn", help="Weights plainly rounded; no calibration.")] = False,
    bits: Annotated[int | None, typer.Option(help="Bits a weight (4; --smoothquant and --fp8: 8).")] = None,
    group_size: Annotated[str | None, typer.Option(help="Inputs that share a scale: auto, channel, 128 …")] = None,
    symmetric: Annotated[bool | None, typer.Option("--sym/--asym", help="Without or with zero points.")] = None,
    fp8_scheme: Annotated[str | None, typer.Option(help="dynamic (a scale a token) or static (calibrated).")] = None,
    alpha: Annotated[float | None, typer.Option(help="SmoothQuant's, 0 to 1 (searched for each mapping).")] = None,
    damp: Annotated[float | None, typer.Option(help="GPTQ's damping, a share of the mean diagonal (0.01).")] = None,
    dry_quant: Annotated[bool, typer.Option("--dry-quant", help="Move the scales, round nothing.")] = False,
    kv: Annotated[str | None, typer.Option(help="fp8 or int8: calibrate scales of the KV-cache too.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="TOML file with settings for single linears.")] = None,
    format: Annotated[str | None, typer.Option(help="Layout on disk (compressed-tensors).")] = None,
    backend: Annotated[str | None, typer.Option(help="Who quantizes: llmq, llmcompressor, autoawq, autogptq.")] = None,
    calib: Annotated[str | None, typer.Option(help="Text or .jsonl file, datasets id, or builtin.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Calibration samples (128).")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample at most (2048).")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Linears to leave in 16 bit, see below.")] = None,
    target: Annotated[str | None, typer.Option(help="Mean bits a weight to choose bits for: 4.25bits.")] = None,
    max_kl: Annotated[float | None, typer.Option(help="Most KL divergence to choose bits for: 0.02.")] = None,
    proof: Annotated[bool, typer.Option(help="Compare the result with the original on held-out text.")] = True,
    restart: Annotated[bool, typer.Option("--restart", help="Drop the layers that an interrupted run kept.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Quantize MODEL into the folder OUT, which llmq serve, transformers and vLLM load.

    Without a method: FP8 where the device computes in it, else AWQ; in a search the better of AWQ and GPTQ. The head
    and the embedding stay in 16 bit.
    --target and --max-kl measure what each linear's rounding costs the model and choose its bits and group size.
    --ignore names linears by words of their name (down_proj, layers.0) or by re: and a regular expression; repeatable.
    Finished layers are kept in OUT.work until all are done: after an interruption the same command goes on from there.
    """
    from llmq.profiles.checkpoint import find_model, read_checkpoint
    from llmq.quantize.preflight import preflight
    from llmq.quantize.recipe_file import build_recipe, read_recipe_file

    flags = {"awq": awq, "gptq": gptq, "best": best, "smoothquant": smoothquant, "fp8": fp8, "rtn": rtn}
    asked = [name for name, is_set in flags.items() if is_set]
    if len(asked) > 1:
        raise InputError(f"one method at a time: --{' and --'.join(asked)} were given")
    _check_device_name(device)
    content = {} if recipe is None else read_recipe_file(recipe)
    method, reason = _method(asked, content, backend, device, is_searched=bool(target or max_kl))
    given = {
        "method": method,
        "bits": bits,
        "group_size": group_size,
        "symmetric": symmetric,
        "fp8_scheme": fp8_scheme,
        "alpha": alpha,
        "damp": damp,
        "smooth_only": dry_quant,
        "ignore": ignore,
        "kv": kv,
        "format": format,
        "backend": backend,
    }
    chosen = build_recipe(content, given)
    goal = _goal(chosen, target, max_kl, bits, group_size)
    _refuse_unused_calibration(chosen, calib, samples, seq_len)
    with console.progress() as progress:
        source = read_checkpoint(find_model(model, progress=progress))
    plan = preflight(source, chosen, out, device)
    space = None if goal is None else _search_space(plan, goal)
    texts = _read_texts(plan, calib, seq_len) if chosen.is_calibrated else None
    device = _resolve_device(device)
    calibration = _calibration(plan, texts, samples, seq_len) if texts is not None else None
    _announce(plan, reason, calibration, device, goal)
    doubts = _warn_of(plan, calibration, device)
    run = partial(_run, calibration=calibration, device=device, restart=restart)
    if goal is None:
        report = run(plan)
    else:
        report = Search(plan, space, goal, device).run(calibration, run, restart=restart)
    if proof and report.proof is None:
        report = prove(report, plan.out, device)
    for warning in report.warnings:
        if warning not in doubts:
            console.warn(warning)
    console.print_json(report.as_dict()) if as_json else _print_report(plan, report)


def _method(
    asked: list[str], content: dict[str, Any], backend: str | None, device: str, *, is_searched: bool
) -> tuple[str, str]:
    """The method for what no rule of the recipe file names otherwise, and why that one."""
    from llmq.quantize.backends.registry import OWN, backend_named

    if asked:
        return asked[0], "as asked"
    if "method" in content:
        return content["method"], "as the recipe says"
    if backend not in (None, OWN):
        return backend_named(backend).methods[0], f"what --backend {backend} is asked for"
    if is_searched:
        return "best", "the default of a search"
    return _default_method(device)


def _goal(
    recipe: "Recipe", target: str | None, max_kl: float | None, bits: int | None, group_size: str | None
) -> "Goal | None":
    from llmq.quantize.bit_search import Goal, check_searchable

    goal = Goal.of(target, max_kl)
    if goal is None:
        return None
    for flag, value in (("--bits", bits), ("--group-size", group_size)):
        if value is not None:
            raise InputError(f"{flag} {value} and a search for it: leave {flag} out with --target and --max-kl")
    check_searchable(recipe)
    if not recipe.is_calibrated:
        raise InputError(f"--target and --max-kl measure on calibration data, which --{recipe.method} takes none of")
    return goal


def _search_space(plan: "Plan", goal: "Goal") -> "SearchSpace":
    from llmq.quantize.bit_search import check_goal, search_space

    space = search_space(plan)
    check_goal(plan, space, goal)
    return space


def _run(plan: "Plan", calibration: "CalibrationSet | None", device: str, restart: bool) -> "QuantizationReport":
    from llmq.quantize.pipeline import quantize_model
    from llmq.quantize.preflight import work_path
    from llmq.quantize.work_folder import WorkFolder

    try:
        with console.progress() as progress:
            return quantize_model(plan, calibration, device=device, restart=restart, progress=progress)
    except KeyboardInterrupt:
        work = WorkFolder(work_path(plan.out))
        if finished := len(work.files()):
            console.status(f"{finished} finished layers are kept in {work.path}: the same command goes on from there")
        raise


def _check_device_name(device: str) -> None:
    if device not in ("auto", "cpu") and not device.startswith("cuda"):
        raise InputError(f"--device {device}: auto, cpu or cuda is expected")


def _resolve_device(device: str) -> str:
    """The device to compute on. Where there may be a GPU it imports torch: called after all that is refused without."""
    from llmq.profiles.machine import may_have_gpu

    if device == "cpu" or (device == "auto" and not may_have_gpu()):
        return "cpu"
    if not may_have_gpu():
        raise InputError(f"--device {device}: this machine has no driver of a GPU")
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available():
        raise InputError(f"--device {device}: torch sees no CUDA device on this machine")
    return device


def _default_method(device: str) -> tuple[str, str]:
    """FP8 where the device multiplies in it, else AWQ; and why."""
    device = _resolve_device(device)
    if device == "cpu":
        return "awq", "the default here: no device that computes in FP8"
    import torch

    name = torch.cuda.get_device_name(device)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        return "fp8", f"the default here: {name} computes in FP8"
    return "awq", f"the default here: {name} does not compute in FP8"


def _refuse_unused_calibration(recipe: "Recipe", calib: str | None, samples: int | None, seq_len: int | None) -> None:

    if recipe.is_calibrated:
        return
    given = {"--calib": calib, "--samples": samples, "--seq-len": seq_len}
    if unused := [flag for flag, value in given.items() if value is not None]:
        raise InputError(f"{' and '.join(unused)} with --{recipe.method}, which is not calibrated: leave out")


def _read_texts(plan: "Plan", calib: str | None, seq_len: int | None) -> "Texts":
    from llmq.quantize.calibration import BUILTIN, read_texts

    longest = plan.source.architecture.max_position_embeddings
    if seq_len is not None and seq_len > longest:
        raise InputError(f"--seq-len {seq_len}: the model reads at most {longest} tokens")
    return read_texts(calib or BUILTIN)


def _calibration(plan: "Plan", texts: "Texts", samples: int | None, seq_len: int | None) -> "CalibrationSet":
    from llmq.quantize.calibration import load_calibration, load_tokenizer

    longest = plan.source.architecture.max_position_embeddings
    return load_calibration(
        texts,
        load_tokenizer(plan.source.path),
        num_samples=samples or DEFAULT_SAMPLES,
        seq_len=seq_len or min(DEFAULT_SEQ_LEN, longest),
    )


def _announce(
    plan: "Plan", reason: str, calibration: "CalibrationSet | None", device: str, goal: "Goal | None"
) -> None:
    """Every choice, resolved, before the work starts."""

    recipe, left = plan.recipe, plan.selection.left_alone
    peak = _peak_memory(plan, calibration)
    scheme = [
        f"method      {recipe.traits.title}, {recipe.bits} bits ({reason})",
        f"scheme      {plan.scheme_name}",
        f"group size  {recipe.group_size} ({plan.group_size_reason})",
    ]
    size = f", {console.format_bytes_exact(plan.predicted_bytes)} of weights predicted"
    if goal is not None:
        scheme = [
            f"method      {recipe.traits.title} ({reason})",
            f"scheme      searched for each linear, {goal.words}",
        ]
        size = ""
    rows = [
        *scheme,
        f"model       {plan.source.path}",
        f"targets     {len(plan.targets)} linears; {len(left)} left in {plan.dtype}: {_shortened(list(left))}",
        *([f"KV-cache    {recipe.kv}, a calibrated scale for K and one for V of each layer"] if recipe.kv else []),
        f"backend     {recipe.backend}, written as {recipe.format}, which {', '.join(plan.loaders)} load",
        *(
            []
            if peak is None
            else [f"memory      about {console.format_bytes(peak)} at most, beside the program itself"]
        ),
        f"device      {device}",
        f"output      {plan.out}{size}",
    ]
    if calibration is not None:
        p = calibration.provenance
        rows.insert(
            len(scheme) + 1,
            f"calibration {p.source}: {p.num_samples} samples, {p.num_tokens:,} tokens ({p.rendering}; BOS: {p.bos}; "
            f"{p.num_empty} empty texts dropped, {p.num_truncated} cut at {p.seq_len})",
        )
    for row in rows:
        console.status(row)


def _peak_memory(plan: "Plan", calibration: "CalibrationSet | None") -> int | None:
    from llmq.quantize.backends.registry import OWN
    from llmq.quantize.sizes import peak_memory

    if plan.recipe.backend != OWN:
        return None
    lengths = [0] if calibration is None else [len(sample) for sample in calibration.samples]
    return peak_memory(plan.source, plan.targets, plan.settings, sum(lengths), max(lengths))


def _warn_of(plan: "Plan", calibration: "CalibrationSet | None", device: str) -> list[str]:
    """Say before the work what is doubtful about it."""
    from llmq.profiles import machine
    from llmq.quantize.pipeline import calibration_warnings

    warnings = [*plan.warnings, *calibration_warnings(plan, calibration)]
    peak, free = _peak_memory(plan, calibration), machine.available_memory_bytes()
    if device == "cpu" and peak is not None and peak > free:
        needed, there = console.format_bytes(peak), console.format_bytes(free)
        warnings.append(f"this takes about {needed} of memory for the largest layer, and {there} are free here")
    for warning in warnings:
        console.warn(warning)
    return warnings


def _shortened(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _print_report(plan: "Plan", report: "QuantizationReport") -> None:
    from llmq.profiles.units import format_share
    from llmq.quantize.report import REPORT_FILE
    from llmq.quantize.report_html import REPORT_PAGE

    before, after = report.bytes_before, report.bytes_after
    over_all = f"{report.bits_per_weight:.2f} over all"
    if report.bits_per_quantized_weight is not None:
        over_all += f", {report.bits_per_quantized_weight:.2f} in the linears"
    rows = [
        ["weights before", console.format_bytes_exact(before)],
        ["weights after", f"{console.format_bytes_exact(after)}, {after / before:.1%}"],
        ["bits a weight", over_all],
    ]
    if errors := report.mean_output_error():
        ours, plain = map(format_share, errors)
        rows.append(["output error", f"{ours} of the energy, mean of the linears (rounding alone: {plain})"])
    elif report.linears:
        mean = sum(entry.weight_error for entry in report.linears) / len(report.linears)
        rows.append(["weight error", f"{format_share(mean)} of the energy, mean of the linears"])
    rows.append(["time", console.format_duration(report.duration_s)])
    rows.append(["report", f"{plan.out / REPORT_FILE}, and as a page: {REPORT_PAGE}"])
    console.print_table(f"{plan.out}: {report.scheme}", ["", ""], rows)
    print_proof(report)
    for name, count in _skip_reasons(report).items():
        console.status(f"{count} scale mappings skipped: {name}")
    worst = sorted(report.linears, key=lambda entry: entry.output_error or entry.weight_error, reverse=True)[:3]
    if worst:
        listed = ", ".join(f"{one.name} {format_share(one.output_error or one.weight_error)}" for one in worst)
        console.status(f"largest error: {listed}")


def _skip_reasons(report: "QuantizationReport") -> dict[str, int]:
    """Why scales were not moved, and how often."""
    reasons: dict[str, int] = {}
    for scaling in report.scalings:
        if scaling.skipped:
            reasons[scaling.skipped] = reasons.get(scaling.skipped, 0) + 1
    return reasons
