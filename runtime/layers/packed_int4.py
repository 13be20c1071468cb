"""Int4 weights in the layout of torch's packed product for CPUs."""

import torch
from torch import Tensor

from llmq.quantize.formats.packing import unpack_unsigned
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.runtime.layers.dense_product import dense_product

# Up to this many rows torch's packed product beats unpacking the weight first (measured on 2 AVX512 cores: 0.05 ms
# against 0.7 ms at one row of 576×1536, even near 64 rows).
MAX_ROWS = 64
GROUP_SIZES = (32, 64, 128, 256)
_BLOCK_ROWS = 64  # of the weight, in the layout of an AVX512 machine
_CHUNK_ELEMENTS = 1 << 20  # enough for a call to cost little, and a step's memory not to grow by a layer's weight


class PackedInt4Linear:
    """W4A16 on a CPU in bf16: few rows go through torch's packed int4 product, for many the weight is made dense.

    weight = (u - 8) · s + z, u of 4 bits, with s and z of each group in bf16, as the product has them: a zero point
    becomes z = -zero_point · s, a float offset z = offset + 8 s. Only torch's layout is held, unless this machine's is
    one that `unpack` does not know (an AVX2 machine's): then beside it the words that came.
    """

    kernel = "torch int4pack"

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.bias, self.column_order = bias, weight.column_order
        self.group_size = weight.scheme.group_size
        stored = unpack_unsigned(weight.values, 4, weight.in_features)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(stored.to(torch.int32), 1)
        scale, offset = weight.scales(), weight.offsets()
        if offset is not None:
            zero = offset + 8 * scale
        else:
            zero = torch.zeros_like(scale) if weight.zero_point is None else -weight.zero_point.float() * scale
        self.scales_and_zeros = torch.stack((scale, zero), dim=2).transpose(0, 1).contiguous().to(dtype)
        self.weight = None if torch.equal(unpack(self.packed), stored.T) else weight
        self.num_bytes = self.packed.nbytes + self.scales_and_zeros.nbytes
        self.num_bytes += (0 if self.weight is None else weight.num_bytes) + (0 if bias is None else bias.nbytes)

    @staticmethod
    def runs(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
        scheme = weight.scheme
        return (
            weight.values.device.type == "cpu"
            and dtype == torch.bfloat16
            and (scheme.kind, scheme.bits) == ("int", 4)
            and scheme.strategy == "group"
            and scheme.group_size in GROUP_SIZES
            and weight.out_features % 16 == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self.column_order is not None:
            x = x.index_select(1, self.column_order)
        if x.shape[0] > MAX_ROWS:
            return dense_product(x, self._dense(), self.bias)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.packed, self.group_size, self.scales_and_zeros
        )
        return y if self.bias is None else y + self.bias

    def _dense(self) -> Tensor:
        """[out, in] in bf16, each number computed in float32 and rounded once."""
        if self.weight is not None:
            return self.weight.dequantize_as_stored(torch.bfloat16)
        out_features, in_features = self.packed.shape[0], 2 * self.packed.shape[1]
        scales, zeros = self.scales_and_zeros.float().unbind(dim=2)
        zeros = zeros - 8 * scales  # for u · s + (z - 8 s)
        dense = torch.empty(in_features, out_features, dtype=torch.bfloat16)
        groups = max(1, _CHUNK_ELEMENTS // (out_features * self.group_size))
        for first in range(0, len(scales), groups):
            columns = slice(first * self.group_size, min((first + groups) * self.group_size, in_features))
            numbers = torch.empty(columns.stop - columns.start, out_features)
            unpack(self.packed, columns, numbers)
            spread = numbers.view(-1, self.group_size, out_features)
            of_groups = slice(first, first + groups)
            torch.addcmul(zeros[of_groups, None], spread, scales[of_groups, None], out=spread)
            dense[columns] = numbers
        return dense.T


def unpack(packed: Tensor, columns: slice | None = None, into: Tensor | None = None) -> Tensor:
    """What `_convert_weight_to_int4pack_for_cpu` packed on an AVX512 machine: u [in, out] (or some of its rows).

    packed: uint8 [out, in / 2], in truth blocks of 64 outputs: [in, 32 bytes], output n in the low half of byte n and
    n + 32 in the high one; what is left of the outputs lies in neighbours, two a byte.
    """
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    columns = columns or slice(0, in_features)
    if into is None:
        into = torch.empty(columns.stop - columns.start, out_features, dtype=torch.uint8)
    whole = out_features // _BLOCK_ROWS * _BLOCK_ROWS
    if whole:
        blocks = packed[:whole].view(-1, in_features, 32)[:, columns].transpose(0, 1)
        halves = into[:, :whole].unflatten(1, (-1, 2, 32))
        halves[:, :, 0] = blocks & 15
        halves[:, :, 1] = blocks >> 4
    if whole < out_features:
        rest = packed[whole:].reshape(in_features, -1)[columns]
        into[:, whole::2] = rest & 15
        into[:, whole + 1 :: 2] = rest >> 4
    return into
