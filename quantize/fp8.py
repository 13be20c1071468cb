"""FP8 E4M3 weights (Micikevicius et al., arXiv 2209.05433), as pure functions of tensors.

An e4m3 number has 3 bits of mantissa: its error is a share of itself, up to 1/16, and where a weight falls between two
powers of two decides how large. A scale that is 2^(1/8) larger moves all weights of a row through their octave; the one
of eight with the least squared error costs nothing at run time. On SmolLM2-135M's linears it takes 6 to 15 % off the
squared error of scales that put the largest weight at 448; below those, where weights saturate, it only grows.

Static activations (per tensor) take max|x| / 448 over the calibration tokens: e4m3 loses little by being scaled down.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import WeightScheme

E4M3_MAX = 448.0
STEPS_OF_OCTAVE = 8
# A float32 with the four significant bits of e4m3: half of the last one, and the bits behind it.
_HALF_ULP, _KEPT_BITS = 1 << 19, -1 << 20
# Numbers of a weight that are searched at once: the copies of them fit a core's cache.
_MAX_NUMBERS = 2**17

SETTINGS = {"scales": f"searched, {STEPS_OF_OCTAVE} an octave"}


def search_scale(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype) -> Tensor:
    """The scales of least squared error of a [out, in] weight, float32 of `scheme.scale_shape`, as `scale_dtype` holds
    them. What has only zeros gets 1.
    """
    cells = _cells(weight, scheme)
    largest = torch.cat([part.abs().amax(1) for part in _parts(cells)]).to(torch.float32)
    steps = 2 ** (torch.arange(STEPS_OF_OCTAVE, device=weight.device) / STEPS_OF_OCTAVE)
    scales = steps[:, None] * (largest / E4M3_MAX)
    scales = scales.clamp_(min=torch.finfo(scale_dtype).tiny).to(scale_dtype).to(torch.float32)
    scales = torch.where(largest == 0, 1.0, scales)
    inverse = scales.reciprocal().unsqueeze(-1)
    errors, first = torch.empty_like(scales), 0
    for part in _parts(cells):
        rows = slice(first, first := first + len(part))
        numbers = part.to(torch.float32)
        divided, rounded = torch.empty_like(numbers), torch.empty_like(numbers)
        for step in range(STEPS_OF_OCTAVE):
            torch.mul(numbers, inverse[step, rows], out=divided)
            torch.sum(_rounding_error(divided, rounded).square_(), 1, out=errors[step, rows])
    # Scales beyond the dtype's range are infinite, and 0 · ∞ would be taken for the least.
    best = (errors * scales.square()).nan_to_num_(nan=float("inf")).argmin(0, keepdim=True)
    return scales.gather(0, best).view(scheme.scale_shape(tuple(weight.shape)))


def _parts(cells: Tensor) -> tuple[Tensor, ...]:
    """Cells whose copies fit a core's cache together, in order."""
    return cells.split(max(1, _MAX_NUMBERS // cells.shape[1]))


def _rounding_error(x: Tensor, out: Tensor) -> Tensor:
    """What rounding float32 numbers within ±448 to e4m3's four significant bits changes, into `out`; casting takes many
    times as long. Ties go away from zero, where the error is as large. Subnormals (below 2^-6) are rounded too finely:
    what they lack, 2^-10 at most, is nothing beside the error of the largest number.
    """
    bits = out.view(torch.int32)
    torch.add(x.view(torch.int32), _HALF_ULP, out=bits).bitwise_and_(_KEPT_BITS)
    return out.sub_(x)


def quantize_fp8(
    weight: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    scale: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> QuantizedWeight:
    """A [out, in] weight in e4m3, per tensor, row, group or block as `scheme` has it.

    scale: as `search_scale` gives it (the default), for instance of several weights that are to share one.
    """
    scale = search_scale(weight, scheme, scale_dtype) if scale is None else scale
    scaled = weight.to(torch.float32) / _spread(scale, scheme, weight.shape)
    values = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)  # `to_e4m3`, without a copy
    return QuantizedWeight(scheme, tuple(weight.shape), values, scale.to(scale_dtype), input_scale=input_scale)


def static_input_scale(max_input: float, scale_dtype: torch.dtype) -> Tensor:
    """The one scale of all tokens, a float32 scalar as `scale_dtype` holds it; 1 for an input that is always zero."""
    scale = torch.tensor(max_input / E4M3_MAX if max_input > 0 else 1.0)
    return scale.clamp(min=torch.finfo(scale_dtype).tiny).to(scale_dtype).to(torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """Rounded to nearest, saturating: the cast alone makes NaN of what is beyond 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _cell_shape(scheme: WeightScheme, shape: torch.Size) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    rows = {"tensor": shape[0], "block": scheme.block_rows}.get(scheme.strategy, 1)
    return rows, scheme.group_size if scheme.strategy in ("group", "block") else shape[1]


def _cells(matrix: Tensor, scheme: WeightScheme) -> Tensor:
    """[scales, numbers that share one], scales row by row; what a cell lacks at an edge is zero."""
    rows, columns = _cell_shape(scheme, matrix.shape)
    missing = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    matrix = pad(matrix, (0, missing[1], 0, missing[0])) if any(missing) else matrix
    return matrix.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).reshape(-1, rows * columns)


def _spread(scale: Tensor, scheme: WeightScheme, shape: torch.Size) -> Tensor:
    """Scales as a tensor that a [out, in] one can be divided by."""
    rows, columns = _cell_shape(scheme, shape)
    if scheme.strategy in ("tensor", "channel"):
        return scale
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]
