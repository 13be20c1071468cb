"""Weights that read the same input (q/k/v, gate/up) as one."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight

_BY_ROW = ("values", "scale", "zero_point", "offset", "outer_scale", "outer_offset")


def stack_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Their rows one after the other; None where they differ in more than their values, scales and zero points."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if not all(_are_alike(weight, first) for weight in weights):
        return None
    if first.scheme.strategy == "block" and any(w.out_features % w.scheme.block_rows for w in weights[:-1]):
        weights = [weight.spread_blocks() for weight in weights]
        first = weights[0]

    def stacked(name: str) -> Tensor | None:
        if getattr(first, name) is None:
            return None
        parts = [getattr(weight, name) for weight in weights]
        if first.scheme.strategy != "block":  # of which one row of scales may be one row of blocks
            # A scale for the whole tensor becomes one a row.
            parts = [part.expand(weight.out_features, -1) for part, weight in zip(parts, weights, strict=True)]
        return torch.cat(parts)

    strategy = "channel" if first.scheme.strategy == "tensor" else first.scheme.strategy
    return replace(
        first,
        scheme=replace(first.scheme, strategy=strategy),
        shape=(sum(weight.out_features for weight in weights), first.in_features),
        **{name: stacked(name) for name in _BY_ROW},
    )


def _are_alike(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    return (
        one.scheme == other.scheme
        and one.in_features == other.in_features
        and one.scale.dtype == other.scale.dtype
        and (one.outer_scale is None) == (other.outer_scale is None)
        and _equal(one.input_scale, other.input_scale)
        and _equal(one.column_order, other.column_order)
    )


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None) == (other is None) and (one is None or torch.equal(one, other))
