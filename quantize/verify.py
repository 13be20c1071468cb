"""The end of a run: read the folder back with our own reader and hold it against the plan."""

from collections.abc import Set
from pathlib import Path

import torch
from torch import Tensor

from llmq.profiles.checkpoint import Checkpoint, read_checkpoint
from llmq.profiles.errors import FailedError
from llmq.profiles.progress import Progress, silent
from llmq.quantize.formats.registry import format_of
from llmq.quantize.layer_stream import TensorReader, is_finite
from llmq.quantize.preflight import Plan
from llmq.quantize.sizes import is_duplicate_head
from llmq.quantize.targets import HEAD


def verify_folder(folder: Path, plan: Plan, changed: Set[str], progress: Progress = silent) -> None:
    """Raise FailedError unless every target is there in its scheme, every number is finite, and what was left alone has
    the source's bytes, in the declared dtype.

    changed: tensors that stay in 16 bit and are not what they were, or are new (scales of the KV-cache).
    """
    checkpoint = read_checkpoint(folder)
    expected = _verify_linears(checkpoint, plan, progress) if plan.schemes else set()
    _verify_rest(checkpoint, plan, changed, expected)
    if absent := expected - set(checkpoint.tensors):
        raise FailedError(f"{sorted(absent)[0]} was not written ({len(absent)} such tensors)")


def _verify_linears(checkpoint: Checkpoint, plan: Plan, progress: Progress) -> set[str]:
    """Returns the names of the tensors that make the quantized linears."""
    read, config = TensorReader(checkpoint), format_of(checkpoint.quantization, checkpoint.tensors)
    expected, schemes = set(), plan.schemes
    for number, target in enumerate(plan.targets):
        progress("checking", number, len(plan.targets), unit="linears")
        scheme, wanted = config.scheme_for(target.name), schemes[target.name]
        if scheme != wanted:
            raise FailedError(f"{target.name} reads back as {scheme and scheme.name}, not {wanted.name}")
        weight = config.read(target.name, read)
        if weight.shape != (target.out_features, target.in_features):
            raise FailedError(f"{target.name} reads back as {weight.shape}")
        dense = weight.dequantize(getattr(torch, plan.dtype))
        if not bool((weight.scale > 0).all()) or not is_finite(dense):
            raise FailedError(f"{target.name}: a scale or a weight is not finite or not positive")
        expected.update(config.tensor_names(target.name, scheme))
    progress("checking", len(plan.targets), len(plan.targets), unit="linears")
    return expected


def _verify_rest(checkpoint: Checkpoint, plan: Plan, changed: Set[str], expected: Set[str]) -> None:
    read, read_source = TensorReader(checkpoint), TensorReader(plan.source)
    quantized = {f"{name}.weight" for name in plan.schemes}
    left = {name for name in plan.source.tensors if name not in quantized and name not in changed}
    if is_duplicate_head(plan.source):
        left.discard(f"{HEAD}.weight")
    for name in (*changed, *left):
        if name not in checkpoint.tensors:
            raise FailedError(f"{name} was not written")
    for name in checkpoint.tensors:
        if name in expected:
            continue
        if name not in left and name not in changed:
            raise FailedError(f"{name} was written and belongs to nothing")
        tensor = read(name)
        if not is_finite(tensor):
            raise FailedError(f"{name} holds a number that is not finite")
        if name in left and not _same_bytes(tensor, as_stored(read_source(name), plan.dtype)):
            raise FailedError(f"{name} was to be left alone, and is not what it is in {plan.source.path}")


def as_stored(tensor: Tensor, dtype: str) -> Tensor:
    """A tensor that is left alone, as OUT holds it: numbers in the declared dtype, anything else as it is."""
    return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))
