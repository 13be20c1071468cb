"""Round to nearest: a weight -> integers, scales and zero points, group by group. Every method ends here.

The scale is rounded to the dtype it is stored in before the weight is divided by it: storing it costs nothing more.
"""

import torch
from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight, pack_int32
from llmq.quantize.formats.scheme import WeightScheme

# Below these a stored scale would be zero, or denormal where hardware flushes those.
_SMALLEST_SCALE = {torch.float16: 2.0**-24}


def round_weight(
    weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: Tensor | float = 1.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a [out, in] weight to `scheme` (int kinds).

    clip: the share of each group's range that is kept, a number or [out, num_groups]; what lies outside saturates.
    Returns q (int8 [out, in]), scale ([out, num_groups], `scale_dtype`), zero_point (int8, or None when symmetric).
    A group of zeros gets scale 1 and stays exactly zero. Computed in float32.
    """
    groups = _grouped(weight.to(torch.float32), scheme)
    scale, zero = _scale_and_zero(groups, scheme, scale_dtype, clip)
    q = _divide_and_round(groups, scale, zero, scheme)
    zero_point = None if zero is None else zero.squeeze(-1).to(torch.int8)
    return q.view(weight.shape).to(torch.int8), scale.squeeze(-1).to(scale_dtype), zero_point


def round_trip(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: Tensor | float = 1.0) -> Tensor:
    """The float32 weight that `round_weight` stores, dequantized: what the searches compare with the original."""
    groups = _grouped(weight.to(torch.float32), scheme)
    scale, zero = _scale_and_zero(groups, scheme, scale_dtype, clip)
    q = _divide_and_round(groups, scale, zero, scheme)
    if zero is not None:
        q -= zero
    return q.mul_(scale).view(weight.shape)


def quantize_weight(
    weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: Tensor | float = 1.0
) -> QuantizedWeight:
    """`round_weight`, stored as `scheme.layout` has it."""
    q, scale, zero_point = round_weight(weight, scheme, scale_dtype, clip)
    values = pack_int32(q, scheme.bits) if scheme.layout == "pack-quantized" else q
    return QuantizedWeight(scheme, tuple(weight.shape), values, scale, zero_point)


def _grouped(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """[out, num_groups, group_size]"""
    return weight.view(weight.shape[0], scheme.num_groups(weight.shape[1]), -1)


def _scale_and_zero(
    groups: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: Tensor | float
) -> tuple[Tensor, Tensor | None]:
    """float32 scale and zero point [out, num_groups, 1]; the scale as `scale_dtype` holds it."""
    if isinstance(clip, Tensor):
        clip = clip.unsqueeze(-1)
    q_min, q_max = _bounds(scheme)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    low, high = low.clamp(max=0) * clip, high.clamp(min=0) * clip
    if scheme.symmetric:
        # The wider side of the integers (-8) takes the wider side of the weights only if that is the negative one.
        scale = torch.maximum(high / q_max, low / q_min)
    else:
        scale = (high - low) / (q_max - q_min)
    smallest = _SMALLEST_SCALE.get(scale_dtype, torch.finfo(scale_dtype).tiny)
    scale = torch.where(scale == 0, 1.0, scale.clamp(min=smallest).to(scale_dtype).to(torch.float32))
    if scheme.symmetric:
        return scale, None
    return scale, torch.round(q_min - low / scale).clamp_(q_min, q_max)


def _divide_and_round(groups: Tensor, scale: Tensor, zero: Tensor | None, scheme: WeightScheme) -> Tensor:
    q = groups / scale
    if zero is not None:
        q += zero
    return q.round_().clamp_(*_bounds(scheme))


def _bounds(scheme: WeightScheme) -> tuple[int, int]:
    half = 1 << (scheme.bits - 1)
    return -half, half - 1


def saturated_share(weight: Tensor, scheme: WeightScheme, clip: Tensor) -> float:
    """The share of weights that lie outside the range `clip` [out, num_groups] keeps."""
    groups = _grouped(weight, scheme)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    kept = clip.unsqueeze(-1)
    outside = (groups < low.clamp(max=0) * kept) | (groups > high.clamp(min=0) * kept)
    return float(outside.to(torch.float32).mean())
