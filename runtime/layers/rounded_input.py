"""A linear's input rounded to few bits, as on hardware that multiplies in them."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmq.quantize.formats.packing import e2m1_to, e4m3_to, to_e2m1
from llmq.quantize.formats.scheme import ActivationScheme

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0


def round_input(x: Tensor, scheme: ActivationScheme, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x float32 [num_tokens, in] -> its rounded numbers q, still in float32, and scale [num_tokens or 1, groups].

    x is about q · scale, `scheme.group_size` channels a scale, or all of them. The scales are compressed-tensors'
    definitions, so that a checkpoint means here what it meant where it was calibrated: max|x| / 127.5 for int8,
    max|x| / 448 for e4m3; for NVFP4 (e2m1) max|x| / 6 in e4m3 under the stored global scale; for MXFP4 a power of two.
    """
    if scheme.group_size is not None:
        return _round_groups(x, scheme, input_scale)
    if input_scale is not None:
        scale = input_scale.float().view(1, 1)
    else:
        limit = 127.5 if scheme.kind == "int" else _E4M3_MAX
        scale = x.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / limit
    if scheme.kind == "int":
        return (x / scale).round_().clamp_(-128, 127), scale
    return _to_e4m3(x / scale), scale


def _round_groups(x: Tensor, scheme: ActivationScheme, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    size = scheme.group_size
    groups = pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    peak = groups.abs().amax(dim=2)
    if scheme.bits == 8:
        scale = peak.clamp_(min=1e-12) / _E4M3_MAX
        q = _to_e4m3(groups / scale.unsqueeze(2))
    elif global_scale is None:
        # The exponent of max|x|, the next one from 1.75 up, less that of 4, the largest power of two in e2m1.
        mantissa, exponent = torch.frexp(peak)  # mantissa in [0.5, 1)
        exponent += mantissa >= 0.875
        scale = torch.ldexp(torch.ones_like(peak), exponent - 3).clamp_(min=2.0**-126)
        q = e2m1_to(to_e2m1(groups / scale.unsqueeze(2)), torch.float32)
    else:
        inner = _to_e4m3(peak / _E2M1_MAX * global_scale)
        scale = inner.masked_fill_(inner == 0, torch.finfo(torch.float8_e4m3fn).eps) / global_scale
        q = e2m1_to(to_e2m1(groups / scale.unsqueeze(2)), torch.float32)
    return q.flatten(1)[:, : x.shape[1]], scale


def rounded(x: Tensor, scheme: ActivationScheme, input_scale: Tensor | None) -> Tensor:
    """x float32 [num_tokens, in] on its grid: q · scale."""
    q, scale = round_input(x, scheme, input_scale)
    if scheme.group_size is None:
        return q * scale
    return q * scale.repeat_interleave(scheme.group_size, dim=1)[:, : x.shape[1]]


def _to_e4m3(x: Tensor) -> Tensor:
    # Clamped first: the cast to e4m3fn does not saturate, it makes NaN.
    return e4m3_to(x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), torch.float32)
