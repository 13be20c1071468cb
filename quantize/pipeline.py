"""A plan -> a folder: run the method, write what it made and what it left alone, prove it by reading it back."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from llmq.profiles.progress import Progress, silent
from llmq.quantize import awq, layer_methods
from llmq.quantize.backends import llmcompressor
from llmq.quantize.calibration import CalibrationSet
from llmq.quantize.formats.compressed_tensors import ConfigGroup, QuantizationConfig, to_tensors
from llmq.quantize.layer_result import LayerResult
from llmq.quantize.layer_stream import TensorReader
from llmq.quantize.output_folder import ShardWriter, appearing_whole, copy_companions
from llmq.quantize.preflight import Plan, is_duplicate_head
from llmq.quantize.report import REPORT_FILE, LinearReport, QuantizationReport, ScalingReport
from llmq.quantize.targets import HEAD
from llmq.quantize.verify import verify_folder


def quantize_model(
    plan: Plan,
    calibration: CalibrationSet | None = None,
    *,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> QuantizationReport:
    """Run a plan from `preflight`: `plan.out` appears with everything in it, or an error leaves nothing there.

    calibration: needed by the methods that calibrate (`plan.recipe.traits.is_calibrated`), refused by none.
    """
    started = time.monotonic()
    if plan.recipe.traits.is_calibrated and calibration is None:
        raise ValueError(f"{plan.recipe.method} needs calibration data")
    reports: list[LinearReport] = []
    scalings: list[ScalingReport] = []
    warnings = [*plan.warnings, *calibration_warnings(plan, calibration)]
    with appearing_whole(plan.out) as folder:
        copy_companions(plan.source.path, folder)
        writer = ShardWriter(folder)
        done: set[str] = set()
        for result in _run_method(plan, calibration, torch.device(device), progress):
            _write_result(writer, result, done)
            reports += result.reports
            scalings += result.scalings
            warnings += result.warnings
        _write_rest(plan, writer, done)
        writer.finish()
        config = {**plan.source.config, "quantization_config": quantization_config(plan).to_config()}
        _write_json(folder / "config.json", config)
        verify_folder(folder, plan, progress)
        report = _build_report(
            plan, calibration, reports, scalings, warnings, writer.num_bytes, time.monotonic() - started
        )
        _write_json(folder / REPORT_FILE, report.as_dict())
    return report


def quantization_config(plan: Plan) -> QuantizationConfig:
    """OUT's quantization_config: every linear of the decoder but those left alone, each by its full name."""
    return QuantizationConfig((ConfigGroup(("Linear",), plan.recipe.scheme),), tuple(sorted(plan.selection.left_alone)))


def _run_method(
    plan: Plan, calibration: CalibrationSet | None, device: torch.device, progress: Progress
) -> Iterator[LayerResult]:
    if plan.recipe.method == "awq":
        return layer_methods.awq_layers(plan, calibration, device, progress)
    if plan.recipe.method == "rtn":
        return layer_methods.rtn_layers(plan, device, progress)
    return llmcompressor.layers(plan, calibration, device, progress)


def _write_result(writer: ShardWriter, result: LayerResult, done: set[str]) -> None:
    for name, weight in result.linears.items():
        done.add(f"{name}.weight")
        for tensor_name, tensor in to_tensors(name, weight).items():
            writer.add(tensor_name, tensor)
    for name, tensor in result.changed.items():
        done.add(name)
        writer.add(name, tensor)


def _write_rest(plan: Plan, writer: ShardWriter, done: set[str]) -> None:
    """Every other tensor as it is, in the declared dtype: a tied head that the source stores twice is stored once."""
    read, dtype = TensorReader(plan.source), getattr(torch, plan.dtype)
    for name in plan.source.tensors:
        if name in done or (name == f"{HEAD}.weight" and is_duplicate_head(plan.source)):
            continue
        tensor = read(name)
        writer.add(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _build_report(
    plan: Plan,
    calibration: CalibrationSet | None,
    linears: list[LinearReport],
    scalings: list[ScalingReport],
    warnings: list[str],
    bytes_after: int,
    duration_s: float,
) -> QuantizationReport:
    source, targets = plan.source, plan.targets
    num_weights = sum(info.num_elements for info in source.tensors.values())
    num_quantized = sum(target.out_features * target.in_features for target in targets)
    return QuantizationReport(
        tool="llmq",
        versions=_versions(),
        source=str(source.path),
        method=plan.recipe.method,
        scheme=plan.recipe.scheme.name,
        recipe=asdict(plan.recipe),
        settings=_settings(plan),
        group_size={"value": plan.recipe.group_size, "reason": plan.group_size_reason},
        calibration=calibration.as_dict() if calibration is not None and plan.recipe.traits.is_calibrated else None,
        linears=linears,
        scalings=scalings,
        left_alone=plan.selection.left_alone,
        bytes_before=source.total_bytes,
        bytes_after=bytes_after,
        predicted_bytes=plan.predicted_bytes,
        bits_per_weight=bytes_after * 8 / num_weights,
        bits_per_quantized_weight=sum(entry.bytes_after for entry in linears) * 8 / num_quantized,
        duration_s=round(duration_s, 2),
        warnings=warnings,
    )


def calibration_warnings(plan: Plan, calibration: CalibrationSet | None) -> list[str]:
    """What is doubtful about the calibration data, for the user to read before the work."""
    if calibration is None or not plan.recipe.traits.is_calibrated:
        return []
    widest = max(target.in_features for target in plan.targets)
    if calibration.num_tokens < widest:
        return [
            f"{calibration.num_tokens} calibration tokens used, fewer than the {widest} inputs of the widest target "
            "(rank < in_features): the statistics cannot tell its input channels apart; give more text"
        ]
    return []


def _settings(plan: Plan) -> dict[str, Any]:
    if plan.recipe.method == "awq":
        return awq.SETTINGS
    return llmcompressor.SETTINGS.get(plan.recipe.method, {})


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("llmq-toolkit", "torch", "transformers", "llmcompressor", "compressed-tensors"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
