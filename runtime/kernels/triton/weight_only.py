"""y = x Wᵀ + b with W in 4 or 8 bits and x in 16: W4A16, W8A16, FP8 weights, of one linear or of a step's experts."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.runtime.kernels.triton.launch import Launch, Target
from llmq.runtime.kernels.triton.numbers import e4m3_to_fp32, int8_to_fp32

INT4, INT8, FP8 = 0, 1, 2
NO_OFFSET, ZERO_POINT, FLOAT_OFFSET = 0, 1, 2


@dataclass(frozen=True, eq=False)
class ChunkedWeight:
    """W [out, in] in chunks of `chunk` input features, so that what a program reads of a chunk is one piece of memory.

    numbers: [experts, in / chunk, out, chunk] bytes of int8 or e4m3; or, of int4, int32 words of 8 numbers, the first
    in the lowest bits. scales: [experts, groups, out]; W = q · scale; offsets: none; or int8 zero points,
    W = (q - zero) · scale; or float32, W = q · scale + offset. q is signed.
    """

    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None
    shape: tuple[int, int]
    chunk: int
    group_size: int
    format: int

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @property
    def offset_kind(self) -> int:
        if self.offsets is None:
            return NO_OFFSET
        return ZERO_POINT if self.offsets.dtype == torch.int8 else FLOAT_OFFSET

    def expert(self, index: int) -> "ChunkedWeight":
        """One of them, as views."""
        one = slice(index, index + 1)
        offsets = None if self.offsets is None else self.offsets[one]
        return replace(self, numbers=self.numbers[one], scales=self.scales[one], offsets=offsets)

    @classmethod
    def runs(cls, weight: QuantizedWeight) -> bool:
        """Whether there is such a layout of it: integers of 4 or 8 bits, or e4m3, groups a multiple of 32."""
        scheme = weight.scheme
        return (scheme.kind, scheme.bits) in (("int", 4), ("int", 8), ("float", 8)) and _chunk(weight) is not None

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "ChunkedWeight":
        """Every layout on disk in this one. A column order is not in it: the input's columns follow it first."""
        weight = weight.spread_blocks()
        rows, columns = weight.shape
        chunk, is_int4 = _chunk(weight), weight.scheme.bits == 4
        if is_int4:
            stored = weight.values.view(rows, columns // chunk, chunk // 8)
        else:
            stored = weight.integers().view(torch.uint8 if weight.scheme.kind == "float" else torch.int8)
            stored = stored.view(rows, columns // chunk, chunk)
        scale, offset = weight.scales(), weight.offsets()
        if offset is not None:  # of u, which is q + half
            offset = (offset + (1 << (weight.scheme.bits - 1)) * scale).float()
        elif weight.zero_point is not None:
            offset = weight.zero_point
        return cls(
            numbers=stored.transpose(0, 1).contiguous()[None],
            scales=_by_groups(_narrowed(scale, weight.scale.dtype), rows),
            offsets=None if offset is None else _by_groups(offset, rows),
            shape=(rows, columns),
            chunk=chunk,
            group_size=weight.scheme.group_size if weight.scheme.strategy == "group" else columns,
            format=INT4 if is_int4 else (FP8 if weight.scheme.kind == "float" else INT8),
        )

    @classmethod
    def stack(cls, weights: "list[ChunkedWeight]") -> "ChunkedWeight | None":
        """Experts of one shape as one weight; None where they are not alike."""
        first = weights[0]
        kinds = {(w.shape, w.chunk, w.group_size, w.format, w.offset_kind, w.scales.dtype) for w in weights}
        if len(kinds) != 1:
            return None
        numbers, scales = (torch.cat([getattr(w, name) for w in weights]) for name in ("numbers", "scales"))
        offsets = None if first.offsets is None else torch.cat([w.offsets for w in weights])
        return cls(numbers, scales, offsets, first.shape, first.chunk, first.group_size, first.format)


def _chunk(weight: QuantizedWeight) -> int | None:
    group = weight.scheme.group_size if weight.scheme.strategy in ("group", "block") else weight.in_features
    return next((size for size in (64, 32) if weight.in_features % size == 0 and group % size == 0), None)


def _by_groups(rows: Tensor, out_features: int) -> Tensor:
    """[out or 1, groups] -> [1, groups, out]"""
    return rows.expand(out_features, -1).T.contiguous()[None]


def _narrowed(scale: Tensor, stored: torch.dtype) -> Tensor:
    """The float32 scales in their checkpoint's 16 bits, where that loses nothing."""
    if stored in (torch.float16, torch.bfloat16) and torch.equal(scale.to(stored).float(), scale):
        return scale.to(stored)
    return scale


@triton.jit
def _int4_to_fp32(words):
    """int32 [N, W] of eight unsigned nibbles -> q = u - 8, float32 [N, 8 W]: the bits of 2**23 + u, less 2**23 + 8."""
    n0 = (words & 15) | 0x4B000000
    n1 = ((words >> 4) & 15) | 0x4B000000
    n2 = ((words >> 8) & 15) | 0x4B000000
    n3 = ((words >> 12) & 15) | 0x4B000000
    n4 = ((words >> 16) & 15) | 0x4B000000
    n5 = ((words >> 20) & 15) | 0x4B000000
    n6 = ((words >> 24) & 15) | 0x4B000000
    n7 = ((words >> 28) & 15) | 0x4B000000
    even = tl.join(tl.join(n0, n4), tl.join(n2, n6))  # [..., 4 and up, 2 and up]
    odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
    bits = tl.reshape(tl.join(even, odd), (words.shape[0], words.shape[1] * 8))
    return bits.to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def _multiply(
    x,
    numbers,
    scales,
    offsets,
    bias,
    tiles,
    y,
    partial,
    num_rows,
    out_features,
    in_features,
    x_stride,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """ROWS rows times OUTPUTS outputs over one part of the input features, as Wx: the weight is the product's first
    factor, whose 64 or 128 rows fill the tensor cores whatever the number of tokens.

    Bytes: the weight, its scales and offsets once for each tile of rows (from HBM once), x once for each tile of
    outputs (from the L2 cache), y once. FLOPs: 2 · rows · out · in, and 2 a number of the weight.
    """
    expert, first_row = 0, tl.program_id(1) * ROWS
    count = num_rows - first_row
    if GROUPED:
        expert = tl.load(tiles + tl.program_id(1) * 3)
        first_row = tl.load(tiles + tl.program_id(1) * 3 + 1)
        count = tl.load(tiles + tl.program_id(1) * 3 + 2)
    if count > 0:
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        row = first_row + tl.arange(0, ROWS)
        is_row, is_output = tl.arange(0, ROWS) < count, output < out_features
        num_chunks = in_features // CHUNK
        share = tl.cdiv(num_chunks, NUM_SPLITS)
        begin = tl.program_id(2) * share
        end = tl.minimum(begin + share, num_chunks)
        WIDTH: tl.constexpr = CHUNK // 8 if FORMAT == 0 else CHUNK
        piece = (tl.cast(expert, tl.int64) * num_chunks + begin) * out_features * WIDTH
        number_address = numbers + piece + output[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        feature = begin * CHUNK + tl.arange(0, CHUNK)
        x_address = x + row.to(tl.int64)[None, :] * x_stride + feature[:, None]
        scale_base = tl.cast(expert, tl.int64) * num_groups * out_features + output
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for chunk in tl.range(begin, end):
            stored = tl.load(number_address, mask=is_output[:, None], other=0)
            inputs = tl.load(x_address, mask=is_row[None, :], other=0.0)
            place = scale_base + (chunk * CHUNK // GROUP_SIZE) * out_features
            scale = tl.load(scales + place, mask=is_output, other=0.0).to(tl.float32)
            if FORMAT == 0:
                weight = _int4_to_fp32(stored)
            elif FORMAT == 1:
                weight = int8_to_fp32(stored)
            else:
                weight = e4m3_to_fp32(stored)
            if OFFSET == 1:
                weight -= tl.load(offsets + place, mask=is_output, other=0).to(tl.float32)[:, None]
            weight *= scale[:, None]
            if OFFSET == 2:
                weight += tl.load(offsets + place, mask=is_output, other=0.0)[:, None]
            total = tl.dot(weight.to(inputs.dtype), inputs, total, input_precision="ieee")
            number_address += out_features * WIDTH
            x_address += CHUNK
        is_number = is_row[:, None] & is_output[None, :]
        if NUM_SPLITS == 1:
            if HAS_BIAS:
                total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
            address = y + row.to(tl.int64)[:, None] * out_features + output[None, :]
            tl.store(address, tl.trans(total).to(y.dtype.element_ty), mask=is_number)
        else:
            part = tl.program_id(2).to(tl.int64) * num_rows * out_features
            address = partial + part + row.to(tl.int64)[:, None] * out_features + output[None, :]
            tl.store(address, tl.trans(total), mask=is_number)


@triton.jit
def _sum_parts(
    partial,
    bias,
    y,
    num_rows,
    out_features,
    NUM_SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One row's outputs: the sum of its parts, always in one order, and the bias. Bytes: 4 · NUM_SPLITS a number."""
    row = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < out_features
    total = tl.zeros([OUTPUTS], tl.float32)
    for split in tl.range(0, NUM_SPLITS):
        place = (tl.cast(split, tl.int64) * num_rows + row) * out_features + output
        total += tl.load(partial + place, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(y + row * out_features + output, total.to(y.dtype.element_ty), mask=is_output)


def multiply(x: Tensor, weight: ChunkedWeight, bias: Tensor | None, y: Tensor, target: Target) -> list[Launch]:
    """y = x Wᵀ + b. x [num_rows, in], of any row stride; y [num_rows, out], contiguous, both in one dtype."""
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    rows, outputs, num_warps, num_stages = _shape(num_rows, target)
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(out_features, outputs)
    # Few rows: so that each processor has two programs, and each program at least 512 input features.
    splits = max(1, min(2 * target.num_processors // programs, in_features // 512, 16)) if num_rows <= 64 else 1
    partial = None
    if splits > 1:
        partial = torch.empty(splits, num_rows, out_features, dtype=torch.float32, device=x.device)
    launch = _launch(
        *(x, weight, bias, None, y, partial, splits, triton.cdiv(num_rows, rows)),
        *(rows, outputs, num_warps, num_stages),
    )
    if splits == 1:
        return [launch]
    total = Launch(
        _sum_parts,
        (triton.cdiv(out_features, 1024), num_rows),
        {"partial": partial, "bias": bias, "y": y, "num_rows": num_rows, "out_features": out_features},
        {"NUM_SPLITS": splits, "OUTPUTS": 1024, "HAS_BIAS": bias is not None},
    )
    return [launch, total]


def multiply_grouped(x: Tensor, weight: ChunkedWeight, tiles: Tensor, rows: int, y: Tensor, target: Target) -> Launch:
    """y[row] = x[row] W_eᵀ for rows sorted by expert. tiles: int32 [num_tiles, 3], the expert, the first row and how
    many of at most `rows` rows; a tile of none is passed over."""
    return _launch(x, weight, None, tiles, y, None, 1, len(tiles), rows, *_shape(rows, target)[1:])


def expert_tiles(counts: Tensor, num_rows: int, rows: int) -> Tensor:
    """The tiles of `counts` [experts] rows, which lie one after the other and are `num_rows` in all: as many as there
    can be, the last ones of none, so that nothing of it has to be known to the host."""
    most = num_rows // rows + len(counts)
    per_expert = (counts + rows - 1) // rows
    ends = per_expert.cumsum(0)
    tile = torch.arange(most, device=counts.device)
    expert = torch.searchsorted(ends, tile, right=True)
    is_tile = expert < len(counts)
    expert = expert.clamp(max=len(counts) - 1)
    done = (tile - (ends - per_expert)[expert]) * rows
    first = (counts.cumsum(0) - counts)[expert] + done
    count = torch.where(is_tile, (counts[expert] - done).clamp(max=rows), 0)
    return torch.stack((expert, first, count), dim=1).to(torch.int32)


def grouped_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a tile: what an expert gets on average, as far as a product takes it."""
    share = -(-num_rows // num_experts)
    return next((rows for rows in (16, 64) if share <= rows), 128)


def _launch(
    x: Tensor,
    weight: ChunkedWeight,
    bias: Tensor | None,
    tiles: Tensor | None,
    y: Tensor,
    partial: Tensor | None,
    splits: int,
    num_tiles: int,
    rows: int,
    outputs: int,
    num_warps: int,
    num_stages: int,
) -> Launch:
    out_features, in_features = weight.shape
    return Launch(
        _multiply,
        (triton.cdiv(out_features, outputs), num_tiles, splits),
        {
            "x": x,
            "numbers": weight.numbers,
            "scales": weight.scales,
            "offsets": weight.offsets,
            "bias": bias,
            "tiles": tiles,
            "y": y,
            "partial": partial,
            "num_rows": x.shape[0],
            "out_features": out_features,
            "in_features": in_features,
            "x_stride": x.stride(0),
            "num_groups": weight.scales.shape[1],
        },
        {
            "GROUP_SIZE": weight.group_size,
            "CHUNK": weight.chunk,
            "ROWS": rows,
            "OUTPUTS": outputs,
            "NUM_SPLITS": splits,
            "FORMAT": weight.format,
            "OFFSET": weight.offset_kind,
            "HAS_BIAS": bias is not None,
            "GROUPED": tiles is not None,
        },
        num_warps,
        num_stages,
    )


def _shape(num_rows: int, target: Target) -> tuple[int, int, int, int]:
    """(rows, outputs, warps, stages) of a program. Few rows wait for memory, and want many loads in flight; many rows
    wait for the tensor cores, of which Hopper's want 64 outputs for each four warps."""
    if num_rows <= 16:
        return 16, 64, 4, 4 if target.backend == "cuda" else 2
    if num_rows <= 64:
        return 64, 64, 4, 3 if target.backend == "cuda" else 2
    return 128, 128, 8, 3 if target.has_large_tiles else 2
