"""The end of a run: read the folder back with our own reader and hold it against the plan."""

from pathlib import Path

import torch

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import FailedError
from llmq.profiles.progress import Progress, silent
from llmq.quantize.formats.compressed_tensors import QuantizationConfig
from llmq.quantize.layer_stream import TensorReader
from llmq.quantize.preflight import Plan


def verify_folder(folder: Path, plan: Plan, progress: Progress = silent) -> None:
    """Raise FailedError unless every target is there in its scheme and every number is finite.

    Every tensor must belong to something: a linear that was to be left alone is not among the packed ones.
    """
    checkpoint = read_checkpoint(folder)
    read = TensorReader(checkpoint)
    config = QuantizationConfig.from_config(checkpoint.quantization)
    expected = set()
    for number, target in enumerate(plan.targets):
        progress("checking", number, len(plan.targets), unit="linears")
        scheme = config.scheme_for(target.name)
        if scheme != plan.recipe.scheme:
            raise FailedError(f"{target.name} reads back as {scheme and scheme.name}, not {plan.recipe.scheme.name}")
        weight = config.read(target.name, read)
        if weight.shape != (target.out_features, target.in_features):
            raise FailedError(f"{target.name} reads back as {weight.shape}")
        if not bool((weight.scale > 0).all()) or not bool(torch.isfinite(weight.dequantize()).all()):
            raise FailedError(f"{target.name}: a scale or a weight is not finite or not positive")
        expected.update(config.tensor_names(target.name, scheme))
    quantized = {f"{target.name}.weight" for target in plan.targets}
    left = [name for name in plan.source.tensors if name not in quantized]
    for name in checkpoint.tensors:
        if name in expected:
            continue
        if name not in left:
            raise FailedError(f"{name} was written and belongs to nothing")
        if not bool(torch.isfinite(read(name)).all()):
            raise FailedError(f"{name} holds a number that is not finite")
    if absent := expected - set(checkpoint.tensors):
        raise FailedError(f"{sorted(absent)[0]} was not written ({len(absent)} such tensors)")
    progress("checking", len(plan.targets), len(plan.targets), unit="linears")
