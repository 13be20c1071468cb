"""The methods that are ours, as streams of layers: AWQ and round to nearest."""

from collections.abc import Iterator
from functools import partial

import torch

from llmq.profiles.progress import Progress, silent
from llmq.quantize import awq_layer
from llmq.quantize.calibration import CalibrationSet
from llmq.quantize.layer_result import LayerResult
from llmq.quantize.layer_stream import LayerStream, TensorReader
from llmq.quantize.layer_work import LayerOutcome, LayerWork
from llmq.quantize.mappings import mappings_of
from llmq.quantize.preflight import Plan
from llmq.quantize.report import LinearReport, ScalingReport, linear_report, relative_error
from llmq.quantize.rounding import quantize_weight
from llmq.quantize.targets import Target


@torch.no_grad()
def awq_layers(
    plan: Plan, calibration: CalibrationSet, device: torch.device, progress: Progress = silent
) -> Iterator[LayerResult]:
    """AWQ, layer after layer: each is calibrated on what the layers before it, already quantized, put out.

    Holds one layer's weights, two moments of its inputs, and one float32 [length, hidden] activation a sample.
    """
    source = plan.source
    stream = LayerStream(source, device)
    hidden = list(stream.embed(calibration.samples))
    targets_by_layer: dict[int, list[Target]] = {}
    for target in plan.targets:
        targets_by_layer.setdefault(target.layer, []).append(target)
    for index in range(stream.num_layers):
        progress("quantizing", index, stream.num_layers, unit="layers")
        targets = targets_by_layer.get(index, [])
        prefix = f"model.layers.{index}."
        with stream.layer(index) as layer:
            outcome = None
            if targets:
                outcome = awq_layer.quantize_layer(
                    LayerWork(
                        layer,
                        {target.name.removeprefix(prefix): plan.recipe.scheme for target in targets},
                        mappings_of(source, index),
                        hidden,
                        partial(stream.run, index, layer),
                        getattr(torch, plan.dtype),
                        source.architecture.head_dim,
                    )
                )
            if index + 1 < stream.num_layers:
                for number, sample in enumerate(hidden):
                    hidden[number] = stream.run(index, layer, sample)
        if outcome is not None:
            yield _as_result(index, outcome, targets)
    progress("quantizing", stream.num_layers, stream.num_layers, unit="layers")


def _as_result(index: int, outcome: LayerOutcome, targets: list[Target]) -> LayerResult:
    prefix = f"model.layers.{index}."
    result = LayerResult(changed={prefix + name: tensor for name, tensor in outcome.changed.items()})
    for target in targets:
        linear = outcome.linears[target.name.removeprefix(prefix)]
        result.linears[target.name] = linear.weight
        result.reports.append(
            linear_report(
                target,
                linear.weight,
                weight_error=linear.weight_error,
                output_error=linear.output_error,
                rtn_output_error=linear.rtn_output_error,
                saturated_share=linear.saturated_share,
                dead_inputs=linear.num_dead_inputs,
                num_tokens=linear.num_tokens,
            )
        )
    for scaling in outcome.scalings:
        result.scalings.append(
            ScalingReport(
                layer=index,
                source=prefix + scaling.mapping.source,
                linears=tuple(prefix + name for name in scaling.mapping.linears),
                skipped=scaling.skipped,
                alpha=scaling.alpha,
                error=scaling.error,
                unscaled_error=scaling.unscaled_error,
                num_unusable=scaling.num_unusable,
            )
        )
    return result


@torch.no_grad()
def rtn_layers(plan: Plan, device: torch.device, progress: Progress = silent) -> Iterator[LayerResult]:
    """Round to nearest: every target on its own, from its weight alone."""
    read, dtype = TensorReader(plan.source), getattr(torch, plan.dtype)
    for number, target in enumerate(plan.targets):
        progress("quantizing", number, len(plan.targets), unit="linears")
        weight = read(f"{target.name}.weight").to(device, torch.float32)
        stored = quantize_weight(weight, plan.recipe.scheme, dtype)
        report: LinearReport = linear_report(target, stored, weight_error=relative_error(stored.dequantize(), weight))
        yield LayerResult(linears={target.name: stored}, reports=[report])
    progress("quantizing", len(plan.targets), len(plan.targets), unit="linears")
