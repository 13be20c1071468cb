"""A linear's weight in fewer bits: one class for every layout on disk, kept packed in memory.

The meaning is always affine, per group of input columns:

    weight[o, i] = (q[o, i] - zero_point[o, g(i)]) * scale[o, g(i)]

with q signed: [-8, 7] for 4 bits, [-128, 127] for 8, an e4m3 number for FP8. `g(i) = i // group_size`; one group a row
is per-channel, one scale for the whole tensor is per-tensor.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

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


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized [out_features, in_features] weight.

    values: int32 [out, ceil(in * bits / 32)], `32 // bits` numbers a word, lowest bits first, each stored as
            q + 2**(bits-1) ("pack-quantized"); or int8 [out, in]; or float8_e4m3fn [out, in].
    scale: [out, num_groups], [out, 1] per channel, [1, 1] per tensor; in the dtype of the checkpoint.
    zero_point: int8, shaped like scale, in q's signed range; None when symmetric.
    input_scale: float32 scalar, of a static activation scheme; None otherwise.
    column_group: int64 [in], the group of each column, of a checkpoint in activation order; None: i // group_size.
    """

    scheme: WeightScheme
    shape: tuple[int, int]
    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    input_scale: Tensor | None = None
    column_group: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes held in memory by all its tensors."""
        tensors = (self.values, self.scale, self.zero_point, self.input_scale, self.column_group)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def integers(self) -> Tensor:
        """q, unpacked: int8 [out, in] (FP8: the float8 values as they are)."""
        if self.scheme.layout == "pack-quantized":
            return unpack_int32(self.values, self.scheme.bits, self.in_features)
        return self.values

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as a dense [out, in] tensor, rounded once to `dtype`."""
        # q - zero_point is a small whole number (or an e4m3 one), exact in bf16 too: with the scale in `dtype` as
        # well, one product in `dtype` is the float32 product rounded once, at half the bytes.
        compute = dtype if self.scale.dtype == dtype == torch.bfloat16 else torch.float32
        q = e4m3_to(self.values, compute) if self.scheme.kind == "float" else self.integers().to(compute)
        scale = self.scale.to(compute)
        if self.column_group is not None:
            if self.zero_point is not None:
                q -= self.zero_point[:, self.column_group].to(compute)
            return (q * scale[:, self.column_group]).to(dtype)
        grouped = q.view(self.out_features, -1, self.scheme.group_size) if self.scheme.strategy == "group" else q
        expand = (slice(None), slice(None), None) if self.scheme.strategy == "group" else ...
        if self.zero_point is not None:
            grouped -= self.zero_point.to(compute)[expand]
        grouped *= scale[expand]
        return grouped.view(self.shape).to(dtype)

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        names = ("values", "scale", "zero_point", "input_scale", "column_group")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: None if t is None else t.to(device) for name, t in tensors.items()})


def pack_int32(q: Tensor, bits: int) -> Tensor:
    """int8 [rows, n] in [-2**(bits-1), 2**(bits-1)) -> int32 [rows, ceil(n * bits / 32)].

    Each number is stored as q + 2**(bits-1); the first is in the lowest bits of the first word; unused bits are zero.
    """
    per_word = _numbers_per_word(bits)
    rows, n = q.shape
    unsigned = q.to(torch.int32) + (1 << (bits - 1))
    num_words = -(-n // per_word)
    unsigned = torch.nn.functional.pad(unsigned, (0, num_words * per_word - n)).view(rows, num_words, per_word)
    packed = torch.zeros(rows, num_words, dtype=torch.int32, device=q.device)
    for position in range(per_word):
        packed |= unsigned[:, :, position] << (bits * position)
    return packed


def unpack_int32(packed: Tensor, bits: int, n: int) -> Tensor:
    """int32 [rows, words] -> int8 [rows, n]; the inverse of `pack_int32`."""
    per_byte = _numbers_per_word(bits) // 4
    # A little-endian word's bytes hold the same order, and byte-wide shifts are what vectorizes.
    stored = packed.contiguous().view(torch.uint8)
    q = torch.empty(*stored.shape, per_byte, dtype=torch.int8, device=packed.device)
    mask, offset = (1 << bits) - 1, 1 << (bits - 1)
    for position in range(per_byte):
        q[:, :, position] = ((stored >> (bits * position)) & mask).view(torch.int8) - offset
    return q.view(packed.shape[0], -1)[:, :n]


def e4m3_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn -> `dtype`, exactly. torch's own CPU conversion goes number by number and is 20 times slower.

    e4m3's exponent and mantissa, moved under bf16's exponent field, are the same number times 2**-120 (the biases are
    7 and 127), subnormals included.
    """
    if values.device.type != "cpu":
        return values.to(dtype)
    bits = values.view(torch.uint8).to(torch.int16)
    moved = ((bits & 0x7F) << 4) | ((bits & 0x80) << 8)
    number = moved.view(torch.bfloat16) * 2.0**120
    # e4m3fn has one NaN a sign, all exponent and mantissa bits set, which would come out as 480.
    return number.masked_fill_((bits & 0x7F) == 0x7F, float("nan")).to(dtype)


def _numbers_per_word(bits: int) -> int:
    if bits not in (4, 8):
        raise FormatError(f"{bits}-bit packed weights are not supported: 4 and 8 are")
    return 32 // bits
