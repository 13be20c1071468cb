"""A plan -> a folder: run the method, write what it made and what it left alone, prove it by reading it back."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmq.profiles.errors import FailedError
from llmq.profiles.progress import Progress, silent
from llmq.profiles.safetensors_file import TensorInfo, read_header
from llmq.quantize.backends.registry import OWN, backend_named
from llmq.quantize.calibration import CalibrationSet
from llmq.quantize.fingerprint import fingerprint, versions
from llmq.quantize.formats.registry import writer_for
from llmq.quantize.layer_loop import run_layers
from llmq.quantize.layer_methods import settings_of
from llmq.quantize.layer_result import LayerResult, load_facts, load_result, save_tensors
from llmq.quantize.layer_stream import TensorReader
from llmq.quantize.output_folder import StoredTensor, appearing_whole, copy_companions, write_tensors
from llmq.quantize.preflight import Plan
from llmq.quantize.recipe import DEFAULT_FORMAT
from llmq.quantize.report import LinearReport, QuantizationReport, ScalingReport
from llmq.quantize.report_files import write_report
from llmq.quantize.sizes import DEFAULT_MEMORY_BYTES, DTYPE_BYTES, is_duplicate_head, linear_bytes
from llmq.quantize.targets import HEAD
from llmq.quantize.verify import as_stored, verify_folder
from llmq.quantize.work_folder import WorkFolder, work_folder

_DTYPE_WORDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def quantize_model(
    plan: Plan,
    calibration: CalibrationSet | None = None,
    *,
    device: torch.device | str = "cpu",
    restart: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress = silent,
) -> QuantizationReport:
    """Run a plan from `preflight`: `plan.out` appears with everything in it, or an error leaves nothing there.

    Finished layers are kept in a folder beside it meanwhile. The same call goes on from what an earlier one left there,
    and writes the bytes that it would have written; from another plan, other data or other code it raises InputError,
    unless `restart` drops what is there.

    calibration: needed where `plan.recipe.is_calibrated`, unused elsewhere. memory_bytes: of activations in memory.
    """
    started, device = time.monotonic(), torch.device(device)
    if not plan.recipe.is_calibrated:
        calibration = None
    elif calibration is None:
        raise ValueError(f"{plan.recipe.method} needs calibration data")
    with work_folder(plan.out, fingerprint(plan, calibration, device), restart=restart) as work:
        if plan.recipe.backend == OWN:
            run_layers(plan, calibration, device, work, progress, memory_bytes)
        else:
            _run_backend(plan, calibration, device, work, progress)
        with appearing_whole(plan.out) as folder:
            copy_companions(plan.source.path, folder)
            facts = [load_facts(path) for path in work.files()]
            num_bytes = write_tensors(folder, list(_tensors(plan, work, facts)), progress=progress)
            _write_json(folder / "config.json", output_config(plan))
            changed = {name for layer in facts for name in (*layer["changed"], *layer["kv_scales"])}
            try:
                verify_folder(folder, plan, changed, progress)
            except FailedError:
                work.clear()  # to go on from what is wrong would end the same way
                raise
            report = _build_report(plan, calibration, facts, num_bytes, time.monotonic() - started)
            write_report(folder, report)
    return report


def output_config(plan: Plan) -> dict[str, Any]:
    """OUT's config.json: the source's, with the quantization, or with the dtype of a model that is not rounded."""
    config = dict(plan.source.config)
    if not plan.schemes:
        return {**{key: value for key, value in config.items() if key != "torch_dtype"}, "dtype": plan.dtype}
    config["quantization_config"] = writer_for(plan.recipe.format).config(
        plan.schemes, tuple(sorted(plan.selection.left_alone)), plan.recipe.kv_scheme
    )
    return config


def _run_backend(
    plan: Plan, calibration: CalibrationSet | None, device: torch.device, work: WorkFolder, progress: Progress
) -> None:
    """A library makes the whole model at once: nothing of an interrupted run can be used."""
    work.clear()
    by_layer: dict[int, LayerResult] = {}
    layer_of = {target.name: target.layer for target in plan.targets}
    for result in backend_named(plan.recipe.backend).layers(plan, calibration, device, progress):
        layer = next((layer_of[name] for name in result.linears), 0)
        merged = by_layer.setdefault(layer, LayerResult())
        merged.linears |= result.linears
        merged.changed |= result.changed
        merged.kv_scales |= result.kv_scales
        merged.reports += result.reports
        merged.scalings += result.scalings
        merged.warnings += result.warnings
    for layer, result in by_layer.items():
        work.save(layer, result)


def _tensors(plan: Plan, work: WorkFolder, facts: list[dict[str, Any]]) -> Iterator[StoredTensor]:
    """All of OUT: what the layers' files hold, then every other tensor as it is, in the declared dtype.

    A tied head that the source stores twice is stored once.
    """
    done = {f"{name}.weight" for layer in facts for name in layer["linears"]}
    for path in _in_format(plan, work):
        read = TensorReader.of_file(path)
        for name, info in read_header(path).items():
            done.add(name)
            yield StoredTensor(info, partial(read, name))
    read, word = TensorReader(plan.source), _DTYPE_WORDS[plan.dtype]
    for name, info in plan.source.tensors.items():
        if name in done or (name == f"{HEAD}.weight" and is_duplicate_head(plan.source)):
            continue
        if info.dtype in ("F64", "F32", "F16", "BF16"):
            size = info.num_elements * (4 if word == "F32" else 2)
            info = TensorInfo(name, word, info.shape, size, info.file)
        yield StoredTensor(info, lambda name=name: as_stored(read(name), plan.dtype))


def _in_format(plan: Plan, work: WorkFolder) -> list[Path]:
    """The layers' files, their linears in the layout that was asked for."""
    if plan.recipe.format == DEFAULT_FORMAT:
        return work.files()
    writer, converted = writer_for(plan.recipe.format), []
    for path in work.files():
        result = load_result(path, plan.schemes)
        tensors = {}
        for name, weight in result.linears.items():
            tensors |= writer.tensors(name, weight)
        converted.append(path.with_name(f"{plan.recipe.format}-{path.name}"))
        save_tensors(tensors | result.changed | result.kv_scales, converted[-1])
    return converted


def _build_report(
    plan: Plan, calibration: CalibrationSet | None, facts: list[dict[str, Any]], bytes_after: int, duration_s: float
) -> QuantizationReport:
    source, schemes = plan.source, plan.schemes
    linears = [_as_written(plan, entry) for layer in facts for entry in layer["reports"]]
    scalings: list[ScalingReport] = [entry for layer in facts for entry in layer["scalings"]]
    warnings = [*plan.warnings, *calibration_warnings(plan, calibration)]
    warnings += [warning for layer in facts for warning in layer["warnings"]]
    num_weights = sum(info.num_elements for info in source.tensors.values())
    num_quantized = sum(target.out_features * target.in_features for target in plan.targets)
    quantized_bytes = sum(entry.bytes_after for entry in linears)
    return QuantizationReport(
        tool="llmq",
        versions=versions(),
        source=str(source.path),
        method=plan.recipe.method,
        scheme=plan.scheme_name,
        recipe=asdict(plan.recipe),
        settings=settings_of(plan.recipe)
        if plan.recipe.backend == OWN
        else backend_named(plan.recipe.backend).settings(plan.recipe.method),
        group_size={"value": plan.recipe.group_size, "reason": plan.group_size_reason},
        calibration=None if calibration is None else calibration.as_dict(),
        linears=linears,
        scalings=scalings,
        left_alone=plan.selection.left_alone,
        bytes_before=source.total_bytes,
        bytes_after=bytes_after,
        predicted_bytes=plan.predicted_bytes,
        bits_per_weight=bytes_after * 8 / num_weights,
        bits_per_quantized_weight=quantized_bytes * 8 / num_quantized if schemes else None,
        duration_s=round(duration_s, 2),
        warnings=warnings,
        loaders=plan.loaders,
    )


def _as_written(plan: Plan, entry: LinearReport) -> LinearReport:
    """The report of a linear with its bytes in the layout of OUT; finished layers are kept in another."""
    if plan.recipe.format == DEFAULT_FORMAT:
        return entry
    target = next(target for target in plan.targets if target.name == entry.name)
    size = linear_bytes(target, plan.schemes[entry.name], DTYPE_BYTES[plan.dtype], plan.recipe.format)
    return replace(entry, bytes_after=size)


def calibration_warnings(plan: Plan, calibration: CalibrationSet | None) -> list[str]:
    """What is doubtful about the calibration data, for the user to read before the work."""
    if calibration is None or not plan.recipe.is_calibrated:
        return []
    widest = max(target.in_features for target in plan.targets)
    if calibration.num_tokens < widest:
        return [
            f"{calibration.num_tokens} calibration tokens used, fewer than the {widest} inputs of the widest target "
            "(rank < in_features): the statistics cannot tell its input channels apart; give more text"
        ]
    return []


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
