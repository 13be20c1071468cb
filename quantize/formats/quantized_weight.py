"""A linear's weight in fewer bits: one class for every layout on disk, kept packed in memory.

The meaning is always affine, per group of columns:

    weight[o, order[j]] = (q[o, j] - zero_point[o, g(j)]) * scale[o, g(j)]         or, with an offset,
    weight[o, order[j]] = u[o, j] * scale[o, g(j)] + offset[o, g(j)]

with q signed: [-8, 7] for 4 bits, [-128, 127] for 8, an e4m3 or e2m1 number for floats; u = q + 2**(bits-1), so that
Q4_1's and the K blocks' minimum is exact where the scale is zero too. `g(j) = j // group_size`; one group a row is
per-channel, one scale for the whole tensor is per-tensor; a scale of a block is shared by `block_rows` rows. Columns
cut out of a weight in activation order are more than they were, the rest of weight zero (`group_runs.py`): the weight
of an input column is the sum of its stored columns'.

A scale may be a product of two, as NVFP4 and the K blocks of GGUF store it: `scale` itself in few bits, times an
`outer_scale` that several groups share; `offset` and `outer_offset` likewise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmq.quantize.formats.group_runs import RUN, grouped_in_runs
from llmq.quantize.formats.packing import e2m1_to, e4m3_to, pack_int32, pack_unsigned, unpack_int32, unpack_unsigned
from llmq.quantize.formats.scheme import ActivationScheme, FormatError, WeightScheme

__all__ = [
    "ActivationScheme",
    "FormatError",
    "QuantizedWeight",
    "WeightScheme",
    "e4m3_to",
    "pack_int32",
    "unpack_int32",
]

_TENSORS = (
    "values",
    "scale",
    "zero_point",
    "offset",
    "outer_scale",
    "outer_offset",
    "input_scale",
    "column_order",
)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized [out_features, in_features] weight.

    values: int32 [out, ceil(in * bits / 32)], a stream of u a row (`packing.pack_int32`; e2m1: of codes); or int8
            [out, in]; or float8_e4m3fn [out, in].
    scale: `scheme.scale_shape(shape)`, that is [out, num_groups], [out, 1] per channel, [1, 1] per tensor,
           [ceil(out / block_rows), num_groups] for blocks; in the dtype of the checkpoint.
    zero_point: int8, shaped like scale, in q's signed range; None when symmetric or with an offset.
    offset: shaped like scale; None but for `scheme.has_offset`.
    outer_scale, outer_offset: float, [out or 1, a divisor of num_groups]; None: 1.
    input_scale: float32 scalar, of a static activation scheme; None otherwise.
    column_order: int64 [in], the input column that each stored column multiplies, of a checkpoint in activation order,
                  whose groups then lie together; None: as they come.
    """

    scheme: WeightScheme
    shape: tuple[int, int]
    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    input_scale: Tensor | None = None
    column_order: Tensor | None = None
    offset: Tensor | None = None
    outer_scale: Tensor | None = None
    outer_offset: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes held in memory by all its tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values() if tensor is not None)

    def integers(self) -> Tensor:
        """q in the stored order of columns, unpacked: int8 [out, in] (floats: their values, e4m3 or float32)."""
        if self.scheme.kind == "float" and self.scheme.bits == 4:
            return self._numbers(torch.float32)
        if self.scheme.layout == "pack-quantized":
            return unpack_int32(self.values, self.scheme.bits, self.in_features)
        return self.values

    def scales(self) -> Tensor:
        """The whole scale, float32, shaped like `scale`: times the outer one, where there is one."""
        return _times_outer(self.scale, self.outer_scale)

    def offsets(self) -> Tensor | None:
        """The whole offset, float32, shaped like `scale`; None where there is none."""
        return None if self.offset is None else _times_outer(self.offset, self.outer_offset)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as a dense [out, in] tensor, its columns in the order of the input, rounded once to `dtype`."""
        weight = self.dequantize_as_stored(dtype)
        if self.column_order is None:
            return weight
        order = self.column_order.to(weight.device)
        return weight.new_zeros(self.out_features, int(order.max()) + 1).index_add_(1, order, weight)

    def dequantize_as_stored(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`dequantize`, its columns in the stored order: multiplies `x.index_select(1, column_order)`."""
        # q - zero_point is a small whole number (or a float one of few bits), exact in bf16 too: with the scale in
        # `dtype` as well, one product in `dtype` is the float32 product rounded once, at half the bytes.
        is_short = self.scale.dtype == dtype == torch.bfloat16 and self.outer_scale is None and self.offset is None
        compute = dtype if is_short else torch.float32
        numbers = self._numbers(compute)
        numbers = numbers.view(self.out_features, -1, self._columns_of_a_scale)
        if self.zero_point is not None:
            numbers -= self._spread(self.zero_point.to(compute))
        numbers *= self._spread(self.scale if is_short else self.scales())
        if self.offset is not None:
            numbers += self._spread(self.offsets())
        return numbers.view(self.out_features, -1)[:, : self.in_features].to(dtype)

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        return self._with(lambda tensor: tensor.to(device))

    def contiguous(self) -> "QuantizedWeight":
        """Its own memory: a slice of a memory-mapped file holds the file's pages."""
        return self._with(lambda tensor: tensor.contiguous() if not tensor.is_contiguous() else tensor.clone())

    def slice_rows(self, start: int, stop: int) -> "QuantizedWeight":
        """Output features start to stop - 1, as views: of a memory-mapped checkpoint nothing else is read."""
        if not 0 <= start < stop <= self.out_features:
            raise FormatError(f"rows {start} to {stop} of a weight with {self.out_features}")
        rows = self.out_features
        whole = self if self.scheme.strategy != "block" or start % self.scheme.block_rows == 0 else self.spread_blocks()
        parts = {name: tensor for name, tensor in whole._tensors().items() if tensor is not None}
        for name in ("values", "scale", "zero_point", "offset", "outer_scale", "outer_offset"):
            if name in parts and parts[name].shape[0] == rows:
                parts[name] = parts[name][start:stop]
        if whole.scheme.strategy == "block":
            first, last = start // whole.scheme.block_rows, -(-stop // whole.scheme.block_rows)
            parts["scale"] = whole.scale[first:last]
        return replace(whole, shape=(stop - start, self.in_features), **parts)

    def slice_columns(self, start: int, stop: int) -> "QuantizedWeight":
        """Input features start to stop - 1, as views. Raises FormatError where they do not end with a group.

        Of a weight in activation order, whose groups lie across all of the input, any columns, copied, in runs of a
        group (`group_runs.py`).
        """
        if not 0 <= start < stop <= self.in_features:
            raise FormatError(f"columns {start} to {stop} of a weight with {self.in_features}")
        if self.column_order is not None:
            return self._input_columns(start, stop)
        step = self.column_step
        if start % step or (stop % step and stop != self.in_features):
            sizes = ", ".join(str(size) for size in self.legal_widths)
            raise FormatError(
                f"columns {start} to {stop} do not begin and end with a group: of {self.in_features} input features "
                f"({self.scheme.name}) each rank's part must be a multiple of {step}; equal parts: {sizes}"
            )
        parts = {"values": self._value_columns(start, stop)}
        if self.scheme.strategy == "group" and self.scale.shape[1] == 1:
            parts["scheme"] = replace(self.scheme, strategy="channel", group_size=None)  # part of the only group
        for name in ("scale", "zero_point", "offset", "outer_scale", "outer_offset"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[1] > 1:
                # The last group of a block scale may be cut short by the width.
                columns = self.in_features // tensor.shape[1] if "outer" in name else self.scheme.group_size
                parts[name] = tensor[:, start // columns : -(-stop // columns)]
        return replace(self, shape=(self.out_features, stop - start), **parts)

    def _input_columns(self, start: int, stop: int) -> "QuantizedWeight":
        """Of a packed weight in activation order."""
        if self.in_features > int(self.column_order.max()) + 1:
            raise FormatError("columns of a part of a weight in activation order: cut them out of the whole")
        places = torch.argsort(self.column_order)[start:stop]
        numbers = unpack_unsigned(self.values, self.scheme.bits, self.in_features).index_select(1, places)
        return self.in_runs(numbers, places // self.scheme.group_size)

    def in_runs(self, numbers: Tensor, groups: Tensor) -> "QuantizedWeight":
        """Input columns of this packed weight in activation order: their u, [out, n], and the group of each."""
        scheme = self.scheme
        middle = 1 << (scheme.bits - 1)
        numbers, scale, zero, order = grouped_in_runs(numbers, groups, self.scale, self.zero_point, middle)
        return replace(
            self,
            scheme=replace(scheme, group_size=RUN),
            shape=(self.out_features, len(order)),
            values=pack_unsigned(numbers, scheme.bits),
            scale=scale,
            zero_point=zero,
            column_order=order,
        )

    @property
    def column_step(self) -> int:
        """Columns may be cut at multiples of this: whole groups (also of an outer scale), and whole words."""
        steps = [self.scheme.column_step(self.in_features)]
        for outer in (self.outer_scale, self.outer_offset):
            if outer is not None and outer.shape[1] > 1:
                steps.append(self.in_features // outer.shape[1])
        return math.lcm(*steps)

    @property
    def legal_widths(self) -> list[int]:
        """Widths of equal parts that `slice_columns` can cut, the whole one included."""
        parts = range(1, self.in_features // self.column_step + 1)
        widths = [self.in_features // n for n in parts if self.in_features % n == 0]
        return [width for width in widths if width % self.column_step == 0 or width == self.in_features]

    def spread_blocks(self) -> "QuantizedWeight":
        """Blocks as groups: each scale once for every row that it covers."""
        if self.scheme.strategy != "block":
            return self
        scale = self.scale.repeat_interleave(self.scheme.block_rows, 0)[: self.out_features]
        return replace(self, scheme=replace(self.scheme, strategy="group", block_rows=None), scale=scale)

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        """q (with an offset: u) as `dtype`, [out, in], columns padded to whole groups."""
        scheme = self.scheme
        if scheme.layout != "pack-quantized":
            numbers = e4m3_to(self.values, dtype) if scheme.kind == "float" else self.values.to(dtype)
        elif scheme.kind == "float":
            numbers = e2m1_to(unpack_unsigned(self.values, scheme.bits, self.in_features), dtype)
        elif scheme.has_offset:
            numbers = unpack_unsigned(self.values, scheme.bits, self.in_features).to(dtype)
        else:
            numbers = unpack_int32(self.values, scheme.bits, self.in_features).to(dtype)
        missing = -self.in_features % self._columns_of_a_scale
        return torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers.contiguous()

    @property
    def _columns_of_a_scale(self) -> int:
        return self.scheme.group_size if self.scheme.strategy in ("group", "block") else self.in_features

    def _spread(self, per_group: Tensor) -> Tensor:
        """[rows of scales, groups] -> [out or 1, groups, 1]"""
        if self.scheme.strategy == "block":
            per_group = per_group.repeat_interleave(self.scheme.block_rows, 0)[: self.out_features]
        return per_group.unsqueeze(-1)

    def _value_columns(self, start: int, stop: int) -> Tensor:
        if self.scheme.layout != "pack-quantized":
            return self.values[:, start:stop]
        return self.values[:, start * self.scheme.bits // 32 : -(-stop * self.scheme.bits // 32)]

    def _tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in _TENSORS}

    def _with(self, change: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        return replace(self, **{name: None if t is None else change(t) for name, t in self._tensors().items()})


def _times_outer(inner: Tensor, outer: Tensor | None) -> Tensor:
    # e8m0 and e4m3 are exact in float32, as is any product of a 6- or 8-bit number and a 16-bit one.
    inner = e4m3_to(inner, torch.float32) if inner.dtype == torch.float8_e4m3fn else inner.float()
    if outer is None:
        return inner
    groups = inner.view(inner.shape[0], outer.shape[1], -1)
    return (groups * outer.float().unsqueeze(-1)).view(inner.shape)
