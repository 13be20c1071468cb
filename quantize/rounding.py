"""Grids of numbers that a weight's groups can take, and round to nearest on them. Every integer method ends here.

The scale is rounded to the dtype it is stored in before the weight is divided by it: storing it costs nothing more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmq.quantize.formats.packing import pack_int32
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import WeightScheme

# Below these a stored scale would be zero, or denormal where hardware flushes those.
_SMALLEST_SCALE = {torch.float16: 2.0**-24}
# Shares of a group's range that a search tries: few bits gain by giving up the far weights, many lose by it.
CLIPS = tuple(1 - i / 20 for i in range(9))  # 1 .. 0.6
FINE_CLIPS = tuple(1 - i / 80 for i in range(9))  # 1 .. 0.9
_FINE_BITS = 6
# Numbers of a weight that are looked at together: the copies of them fit a core's cache.
_MAX_NUMBERS = 2**17


@dataclass(frozen=True)
class Grid:
    """The numbers scale · (q - zero), q a whole number of the scheme's bits, group by group of columns.

    scale: float32 [out, num_groups], as the stored dtype holds it. zero: whole numbers in float32, shaped like it;
    None: symmetric.
    """

    scheme: WeightScheme
    scale: Tensor
    zero: Tensor | None

    def rows(self, rows: slice) -> "Grid":
        """Of some rows of the weight."""
        return Grid(self.scheme, self.scale[rows], None if self.zero is None else self.zero[rows])

    @classmethod
    def cat(cls, grids: Sequence["Grid"]) -> "Grid":
        """Of the rows of several weights, one after the other."""
        zero = None if grids[0].zero is None else torch.cat([grid.zero for grid in grids])
        return cls(grids[0].scheme, torch.cat([grid.scale for grid in grids]), zero)

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest q."""
        return _bounds(self.scheme)

    def nearest(self, weight: Tensor) -> Tensor:
        """q of a [out, in] weight: float32, of its shape; what lies outside of the grid saturates."""
        q = self.grouped(weight) / self.scale.unsqueeze(-1)
        if self.zero is not None:
            q += self.zero.unsqueeze(-1)
        return q.round_().clamp_(*self.bounds).view(weight.shape)

    def round_trip_(self, weight: Tensor) -> Tensor:
        """`values` of `nearest`, in place of the [out, in] weight."""
        groups, scale = self.grouped(weight), self.scale.unsqueeze(-1)
        groups /= scale
        if self.zero is not None:
            groups += self.zero.unsqueeze(-1)
        groups.round_().clamp_(*self.bounds)
        if self.zero is not None:
            groups -= self.zero.unsqueeze(-1)
        groups *= scale
        return weight

    def values(self, q: Tensor) -> Tensor:
        """The weight that q stands for, float32 [out, in]."""
        return (self.centred(q) * self.scale.unsqueeze(-1)).view(q.shape)

    def centred(self, q: Tensor) -> Tensor:
        """q - zero, [out, num_groups, group_size]: what a group's scale multiplies."""
        groups = self.grouped(q)
        return groups.clone() if self.zero is None else groups - self.zero.unsqueeze(-1)

    def grouped(self, weight: Tensor) -> Tensor:
        """[out, num_groups, group_size]"""
        return _grouped(weight, self.scheme)

    def with_scale(self, scale: Tensor, scale_dtype: torch.dtype) -> "Grid":
        """The same zeros under scales that are rounded to `scale_dtype`; where one would not be positive, the old."""
        usable = torch.isfinite(scale) & (scale > 0)
        stored = stored_scale(scale, scale_dtype)
        return Grid(self.scheme, torch.where(usable & torch.isfinite(stored), stored, self.scale), self.zero)

    def store(self, q: Tensor, scale_dtype: torch.dtype) -> QuantizedWeight:
        """q [out, in] as `scheme.layout` has it."""
        integers = q.to(torch.int8)
        values = pack_int32(integers, self.scheme.bits) if self.scheme.layout == "pack-quantized" else integers
        zero_point = None if self.zero is None else self.zero.to(torch.int8)
        return QuantizedWeight(self.scheme, tuple(q.shape), values, self.scale.to(scale_dtype), zero_point)


def range_grid(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: Tensor | float = 1.0) -> Grid:
    """The grid that reaches from each group's least to its largest weight, [out, in] of an integer scheme.

    clip: the share of that range that is kept, a number or [out, num_groups]. A group of zeros gets scale 1 and stays
    exactly zero.
    """
    return _grid_over(*_range(_grouped(weight.to(torch.float32), scheme)), scheme, scale_dtype, clip)


def _range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest of each group, zero among them. Not by `aminmax`, which takes ten times as long."""
    return groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)


def _grid_over(low: Tensor, high: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: Tensor | float) -> Grid:
    low, high = low * clip, high * clip
    q_min, q_max = _bounds(scheme)
    if scheme.symmetric:
        # The wider side of the integers (-8) takes the wider side of the weights only if that is the negative one.
        scale = torch.maximum(high / q_max, low / q_min)
    else:
        scale = (high - low) / (q_max - q_min)
    scale = torch.where(scale == 0, 1.0, stored_scale(scale, scale_dtype))
    zero = None if scheme.symmetric else torch.round(q_min - low / scale).clamp_(q_min, q_max)
    return Grid(scheme, scale, zero)


def searched_grid(
    weight: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> Grid:
    """The `range_grid` whose clip, group by group, rounds with the least sum of importance · (W' - W)^2.

    importance: of each input column, [in], such as the Hessian's diagonal E[x^2]; None: all alike (mean squared error).
    """
    num_rows = max(1, _MAX_NUMBERS // weight.shape[1])
    return Grid.cat([_searched_rows(rows, scheme, scale_dtype, importance) for rows in weight.split(num_rows)])


def _searched_rows(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, importance: Tensor | None) -> Grid:
    groups = _grouped(weight, scheme)
    low, high = _range(groups)
    best, best_error = None, None
    for clip in CLIPS if scheme.bits < _FINE_BITS else FINE_CLIPS:
        grid = _grid_over(low, high, scheme, scale_dtype, clip)
        error = grid.round_trip_(weight.clone()).sub_(weight).square_()
        if importance is not None:
            error *= importance
        error = error.view(groups.shape).sum(-1)
        if best is None:
            best, best_error = grid, error
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        zero = None if grid.zero is None else torch.where(better, grid.zero, best.zero)
        best = Grid(scheme, torch.where(better, grid.scale, best.scale), zero)
    return best


def round_trip(weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: Tensor | float = 1.0) -> Tensor:
    """A [out, in] weight rounded to nearest and dequantized, float32: what the searches compare with the original."""
    grid = range_grid(weight, scheme, scale_dtype, clip)
    return grid.round_trip_(weight.to(torch.float32, copy=True))


def quantize_weight(
    weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: Tensor | float = 1.0
) -> QuantizedWeight:
    """A [out, in] weight rounded to nearest, as it is stored."""
    grid = range_grid(weight, scheme, scale_dtype, clip)
    return grid.store(grid.nearest(weight.to(torch.float32)), scale_dtype)


def saturated_share(weight: Tensor, grid: Grid) -> float:
    """The share of weights that lie more than half a step outside of the grid."""
    num_rows = max(1, _MAX_NUMBERS // weight.shape[1])
    pieces = (slice(start, start + num_rows) for start in range(0, len(weight), num_rows))
    return sum(_num_saturated(weight[rows], grid.rows(rows)) for rows in pieces) / weight.numel()


def _num_saturated(weight: Tensor, grid: Grid) -> int:
    groups, scale = grid.grouped(weight), grid.scale.unsqueeze(-1)
    zero = 0.0 if grid.zero is None else grid.zero.unsqueeze(-1)
    q_min, q_max = grid.bounds
    low, high = (q_min - 0.5 - zero) * scale, (q_max + 0.5 - zero) * scale
    return int(((groups < low) | (groups > high)).sum())


def _grouped(weight: Tensor, scheme: WeightScheme) -> Tensor:
    return weight.view(weight.shape[0], scheme.num_groups(weight.shape[1]), -1)


def _bounds(scheme: WeightScheme) -> tuple[int, int]:
    half = 1 << (scheme.bits - 1)
    return -half, half - 1


def stored_scale(scale: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """The positive scales nearest to these that `scale_dtype` holds, float32; infinite beyond its range."""
    smallest = _SMALLEST_SCALE.get(scale_dtype, torch.finfo(scale_dtype).tiny)
    return scale.clamp(min=smallest).to(scale_dtype).to(torch.float32)
