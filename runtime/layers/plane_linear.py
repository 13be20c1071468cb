"""Integer weights of 2 to 8 bits on a CPU, in a layout that whole vectors can unpack."""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmq.quantize.formats.packing import unpack_unsigned
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.runtime.layers.dense_product import dense_product

_CHUNK_ELEMENTS = 1 << 20  # enough for a call to cost little, and a step's memory not to grow by a layer's weight
_SHIFTS = {width: torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(1) for width in (4, 2, 1)}


class PlaneLinear:
    """y = x Wᵀ + b with W made dense for each call, a few groups of columns at a time.

    Held transposed, so that a group's scale multiplies whole rows: bits are split into planes of 4, 2 and 1 (of 6 bits
    a nibble and two bits), and in a plane of w bits byte n of a row holds the bits of outputs n, n + N w/8, … . No byte
    is added: 1536×2304 of 6 bits in groups of 16 becomes dense in 2.7 ms, from its stream of bits in 11 (one core).
    """

    kernel = "dequantize planes"

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.bias, self.dtype, self.column_order = bias, dtype, weight.column_order
        scheme = weight.scheme
        self.out_features, self.in_features = weight.shape
        self.group_size = scheme.group_size or weight.in_features
        self.widths = [8] if scheme.layout == "int-quantized" else [w for w in (8, 4, 2, 1) if scheme.bits & w]
        # u is counted from 0 where it is packed, from -128 where it is an int8.
        self.half = 0 if scheme.layout == "int-quantized" else 1 << (scheme.bits - 1)
        if scheme.layout == "int-quantized":
            self.planes = [weight.values.T.contiguous()]
        else:
            u = unpack_unsigned(weight.values, scheme.bits, weight.in_features).T
            self.planes = list(_planes(u, self.widths))
        self.parts = {
            name: tensor.expand(self.out_features, -1).T.contiguous()
            for name in ("scale", "outer_scale", "zero_point", "offset", "outer_offset")
            if (tensor := getattr(weight, name)) is not None
        }
        held = [*self.planes, *self.parts.values(), *(t for t in (bias, self.column_order) if t is not None)]
        self.num_bytes = sum(tensor.nbytes for tensor in held)

    @staticmethod
    def runs(weight: QuantizedWeight) -> bool:
        scheme = weight.scheme
        return (
            weight.values.device.type == "cpu"
            and scheme.kind == "int"
            and scheme.strategy in ("group", "channel")
            and weight.out_features % 8 == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self.column_order is not None:
            x = x.index_select(1, self.column_order)
        return dense_product(x, self._dense(), self.bias)

    def _dense(self) -> Tensor:
        """[out, in] in `dtype`, each number computed in float32 and rounded once."""
        scales = self._whole("scale", "outer_scale")
        if "offset" in self.parts:
            zeros = self._whole("offset", "outer_offset")
        elif "zero_point" in self.parts:
            zeros = (self.parts["zero_point"].float() + self.half).neg_() * scales
        else:
            zeros = -self.half * scales
        dense = torch.empty(self.in_features, self.out_features, dtype=self.dtype)
        groups = max(1, _CHUNK_ELEMENTS // (self.out_features * self.group_size))
        for first in range(0, len(scales), groups):
            columns = slice(first * self.group_size, (first + groups) * self.group_size)
            numbers = self._numbers(columns).to(torch.float32).view(-1, self.group_size, self.out_features)
            of_groups = slice(first, first + groups)
            torch.addcmul(zeros[of_groups, None], numbers, scales[of_groups, None], out=numbers)
            dense[columns] = numbers.view(-1, self.out_features)
        return dense.T

    def _numbers(self, columns: slice) -> Tensor:
        """u of some input features: uint8, or int8 where it is signed, [columns, out]"""
        planes = [plane[columns] for plane in self.planes]
        if self.widths == [8]:
            return planes[0]
        numbers: Tensor | None = None
        place = 0  # of the plane's lowest bit
        for plane, width in zip(reversed(planes), reversed(self.widths), strict=True):
            runs = (plane.unsqueeze(1) >> _SHIFTS[width]).bitwise_and_((1 << width) - 1).flatten(1)
            numbers = runs if numbers is None else numbers.bitwise_or_(runs.bitwise_left_shift_(place))
            place += width
        return numbers

    def _whole(self, inner: str, outer: str) -> Tensor:
        """A scale or an offset of each group, float32 [groups, out]."""
        numbers = self.parts[inner].float()
        if outer not in self.parts:
            return numbers
        wide = self.parts[outer].float()
        return (numbers.view(len(wide), -1, self.out_features) * wide[:, None]).view(-1, self.out_features)


def _planes(u: Tensor, widths: list[int]) -> Iterator[Tensor]:
    """uint8 [in, out] -> a plane of each of `widths` bits, from the highest bits down: uint8 [in, out * width / 8]"""
    place = sum(widths)
    for width in widths:
        place -= width
        runs = ((u >> place) & ((1 << width) - 1)).chunk(8 // width, dim=1)
        plane = torch.zeros_like(runs[0], memory_format=torch.contiguous_format)
        for run, part in enumerate(runs):
            plane |= part << (run * width)
        yield plane
