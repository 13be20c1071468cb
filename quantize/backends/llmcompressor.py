"""GPTQ, SmoothQuant and FP8 by llm-compressor's `oneshot`, under our recipe, our calibration data and our writer.

The library quantizes a whole model in memory, in the checkpoint's dtype; what it leaves in each module is turned into
our tensors here. Its warnings go into the report, the rest of its log and its bars nowhere; it reads local files only.
"""

import functools
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from llmq.profiles.progress import Progress, silent
from llmq.quantize.calibration import CalibrationSet
from llmq.quantize.formats.compressed_tensors import ConfigGroup, QuantizationConfig
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.layer_result import LayerResult
from llmq.quantize.layer_stream import TensorReader
from llmq.quantize.mappings import mappings_of
from llmq.quantize.preflight import Plan
from llmq.quantize.report import ScalingReport, linear_report, relative_error

# SmoothQuant's alpha, and GPTQ's damping as a share of the Hessian's mean diagonal: the papers' values.
SMOOTHING_STRENGTH = 0.5
DAMPING = 0.01

SETTINGS = {
    "gptq": {"damping": DAMPING, "activation_order": "static", "backend": "llmcompressor"},
    "smoothquant": {"alpha": SMOOTHING_STRENGTH, "rounding": "nearest", "backend": "llmcompressor"},
    "fp8": {"rounding": "nearest", "backend": "llmcompressor"},
}

# Warnings that say what is meant to be.
_EXPECTED = ("No accelerator available", "Calibration pipeline is set to", "Disabling tokenizer parallelism")


def layers(
    plan: Plan, calibration: CalibrationSet | None, device: torch.device, progress: Progress = silent
) -> Iterator[LayerResult]:
    """Quantize with llm-compressor; all linears at once, as one result a linear (the last one carries the rest)."""
    is_calibrated = plan.recipe.is_calibrated
    with _quiet(plan, progress) as warnings:
        from llmcompressor import oneshot

        model = _load(plan, device)
        dead_inputs = _watch_dead_inputs(plan, model) if is_calibrated else {}
        oneshot(
            model=model,
            recipe=_modifiers(plan),
            dataset=_data_loader(calibration) if is_calibrated else None,
            pipeline="sequential" if is_calibrated else "datafree",
            clear_sparse_session=True,
        )
    yield from _results(plan, model, dead_inputs, warnings)


def _load(plan: Plan, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, plan.dtype)
    model = AutoModelForCausalLM.from_pretrained(plan.source.path, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def _data_loader(calibration: CalibrationSet) -> DataLoader:
    """One sample a batch, as long as it is: the library's own collators truncate or pad."""
    batches = [
        {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        for ids in calibration.samples
    ]
    return DataLoader(batches, batch_size=None, shuffle=False)


def _watch_dead_inputs(plan: Plan, model: nn.Module) -> dict[str, Tensor]:
    """For each target, filled while data passes: the input channels that were zero for every token, [in] of bool."""
    dead: dict[str, Tensor] = {}

    def watch(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        is_zero = (args[0] == 0).flatten(0, -2).all(0)
        dead[name] = is_zero & dead[name] if name in dead else is_zero

    for target in plan.targets:
        model.get_submodule(target.name).register_forward_pre_hook(functools.partial(watch, target.name))
    return dead


def _modifiers(plan: Plan) -> list[Any]:
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    scheme = plan.recipe.scheme
    config = QuantizationConfig((ConfigGroup(("Linear",), scheme),)).to_config()["config_groups"]["group_0"]
    groups = {"group_0": QuantizationScheme(**_only_set(config))}
    ignore = sorted(plan.selection.left_alone)
    if plan.recipe.method == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=ignore, dampening_frac=DAMPING)]
    quantize = QuantizationModifier(config_groups=groups, ignore=ignore)
    # An empty list of mappings would make the library use its own.
    mappings = _smoothed(plan)[0] if plan.recipe.method == "smoothquant" else []
    if not mappings:
        return [quantize]
    return [SmoothQuantModifier(smoothing_strength=SMOOTHING_STRENGTH, mappings=mappings), quantize]


def _smoothed(plan: Plan) -> tuple[list[tuple[list[str], str]], list[ScalingReport]]:
    """SmoothQuant's mappings by full names, norms only as in the paper, and what is skipped and why."""
    quantized = {target.name for target in plan.targets}
    used, reports = [], []
    for index in range(plan.source.architecture.num_layers):
        prefix = f"model.layers.{index}."
        for mapping in mappings_of(plan.source, index):
            names = tuple(prefix + name for name in mapping.linears)
            skipped = None
            if kept := [name for name in names if name not in quantized]:
                skipped = f"{', '.join(kept)} left in 16 bit"
            elif mapping.kind != "norm":
                skipped = "SmoothQuant folds into norms only"
            elif mapping.obstacle is not None:
                skipped = mapping.obstacle
            else:
                used.append((list(names), prefix + mapping.source))
            alpha = None if skipped else SMOOTHING_STRENGTH
            reports.append(ScalingReport(index, prefix + mapping.source, names, skipped, alpha))
    return used, reports


def _only_set(config: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that are None: llm-compressor fills in its own observers."""
    return {
        key: _only_set(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value is not None
    }


@contextmanager
def _quiet(plan: Plan, progress: Progress) -> Iterator[list[str]]:
    """Keep stdout and stderr clean, turn the sequential pipeline's bars into progress, collect what it warns of."""
    from tqdm import tqdm

    warnings: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        # Importing it sets up its own log, on what stdout is then.
        import llmcompressor  # noqa: F401
        from llmcompressor.pipelines.sequential import pipeline
        from loguru import logger

        logger.remove()
        logger.add(functools.partial(_collect, warnings), level="WARNING", format="{message}")
        # A calibrating and a propagating pass over the data for each layer, and for the head.
        steps = _Steps(progress, 2 * (plan.source.architecture.num_layers + 1))
        stack.enter_context(mock.patch.object(pipeline, "tqdm", steps.follow))
        stack.enter_context(mock.patch.object(tqdm, "__init__", _silenced(tqdm.__init__)))
        stack.enter_context(mock.patch.object(logging.getLogger("torch.fx._symbolic_trace"), "disabled", True))
        yield warnings


def _collect(warnings: list[str], message: Any) -> None:
    if message.record["level"].name != "METRIC":  # its own level, above WARNING, for the numbers of each module
        warnings.append(message.record["message"])


def _silenced(init: Callable[..., None]) -> Callable[..., None]:
    def silent_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "disable": True})

    return silent_init


class _Steps:
    """Stands in for the sequential pipeline's tqdm: a pass over the data is one step of our progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.done, self.total = progress, 0, total

    def follow(self, iterable: Iterable[Any], **_: Any) -> Iterator[Any]:
        self.progress("quantizing", self.done, self.total, unit="passes")
        yield from iterable
        self.done += 1
        self.progress("quantizing", self.done, self.total, unit="passes")


def _results(
    plan: Plan, model: nn.Module, dead_inputs: dict[str, Tensor], warnings: list[str]
) -> Iterator[LayerResult]:
    read, modules = TensorReader(plan.source), dict(model.named_modules())
    is_smoothed = plan.recipe.method == "smoothquant"
    for target in plan.targets:
        module = modules[target.name]
        weight = _read_module(module, plan.recipe.scheme)
        # SmoothQuant moved scales into the weight: what rounding cost is told against that one.
        original = module.weight if is_smoothed else read(f"{target.name}.weight").to(module.weight.device)
        error = relative_error(weight.dequantize(), original.detach().to(torch.float32))
        dead = int(dead_inputs[target.name].sum()) if target.name in dead_inputs else None
        report = linear_report(target, weight, weight_error=error, dead_inputs=dead)
        yield LayerResult(linears={target.name: weight}, reports=[report])
    last = LayerResult(
        changed=_changed(plan, model),
        warnings=[text for text in dict.fromkeys(warnings) if not text.startswith(_EXPECTED)],
    )
    if is_smoothed:
        last.scalings = _smoothed(plan)[1]
    yield last


def _read_module(module: nn.Module, scheme: WeightScheme) -> QuantizedWeight:
    """The module's weight as compressed-tensors would store it, read by our reader."""
    from compressed_tensors.compressors import BaseCompressor

    names = ("weight", "weight_scale", "weight_zero_point")
    state = {name: getattr(module, name).detach() for name in names if getattr(module, name, None) is not None}
    compressed = BaseCompressor.get_value_from_registry(scheme.layout).compress(state, module.quantization_scheme)
    config = QuantizationConfig((ConfigGroup(("Linear",), scheme),))
    return config.read("", lambda name: compressed[name.removeprefix(".")])


def _changed(plan: Plan, model: nn.Module) -> dict[str, Tensor]:
    """Tensors that stay in 16 bit and are not what they were: norms that were smoothed."""
    read, quantized = TensorReader(plan.source), {target.name for target in plan.targets}
    changed = {}
    for name, parameter in model.named_parameters():
        if name in plan.source.tensors and name.rsplit(".", 1)[0] not in quantized:
            original = read(name).to(parameter.device, parameter.dtype)
            if not torch.equal(parameter, original):
                changed[name] = parameter.detach()
    return changed
