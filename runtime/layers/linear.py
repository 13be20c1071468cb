"""Linears: dense, or run straight from a QuantizedWeight that stays packed in memory."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight, e4m3_to
from llmq.quantize.formats.stacked import stack_rows
from llmq.runtime.kernels import triton_runs
from llmq.runtime.layers.dense_product import dense_product
from llmq.runtime.layers.native_linear import NativeLinear
from llmq.runtime.layers.packed_int4 import PackedInt4Linear
from llmq.runtime.layers.plane_linear import PlaneLinear
from llmq.runtime.layers.rounded_input import round_input, rounded

Weight = Tensor | QuantizedWeight


class DenseLinear:
    """y = x Wᵀ + b. x [num_tokens, in_features] -> [num_tokens, out_features]."""

    kernel = "dense"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.num_bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        return dense_product(x, self.weight, self.bias)


class WeightOnlyLinear:
    """A quantized weight with activations as they come (W4A16, W8A16): dequantized for each call, then dense."""

    kernel = "dequantize"

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.bias, self.dtype = weight, bias, dtype
        self.num_bytes = weight.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.column_order is not None:
            x = x.index_select(1, self.weight.column_order)
        return dense_product(x, self.weight.dequantize_as_stored(self.dtype), self.bias)


class QuantizedActivationLinear:
    """W8A8: the input is rounded to int8 or e4m3 (per token, or by the checkpoint's static scale), as on hardware that
    multiplies in that format; the product is rescaled by both scales.

        y = (q_x q_wᵀ) · s_x · s_w + b
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.bias, self.dtype = weight, bias, dtype
        self.num_bytes = weight.num_bytes
        self.scale = weight.scale.float().flatten()  # [out_features] or [1]
        self.is_int8 = weight.scheme.kind == "int"
        self.kernel = "torch int8" if self._multiplies_int8 else f"emulated {'int8' if self.is_int8 else 'fp8'}"

    @staticmethod
    def runs(weight: QuantizedWeight) -> bool:
        scheme = weight.scheme
        return (
            scheme.layout != "pack-quantized"
            and scheme.strategy in ("tensor", "channel")
            and scheme.activation.group_size is None
        )

    @property
    def _multiplies_int8(self) -> bool:
        # torch._int_mm on CUDA wants at least 17 rows: there the product runs in the activations' dtype.
        return self.is_int8 and self.weight.values.device.type == "cpu" and self.weight.zero_point is None

    def __call__(self, x: Tensor) -> Tensor:
        q, scale = round_input(x.float(), self.weight.scheme.activation, self.weight.input_scale)
        if self._multiplies_int8:
            y = torch._int_mm(q.to(torch.int8), self.weight.values.t()).float()
        else:
            y = dense_product(q.to(self.dtype), self._integers()).float()
        y = y * scale * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _integers(self) -> Tensor:
        """The weight without its scale: whole numbers up to 255 or e4m3 ones, exact in 16 bits."""
        if not self.is_int8:
            return e4m3_to(self.weight.values, self.dtype)
        q = self.weight.integers().to(self.dtype)
        return q if self.weight.zero_point is None else q - self.weight.zero_point.to(self.dtype)


class RoundedInputLinear(WeightOnlyLinear):
    """Inputs rounded where weight or input have several scales a row (128-blocks of FP8, NVFP4, W4A8): the input is
    rounded to its grid, and both are multiplied as floats in `dtype`, which are exact in float32."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, dtype)
        self.kernel = f"emulated {weight.scheme.activation.name}"

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(rounded(x.float(), self.weight.scheme.activation, self.weight.input_scale).to(x.dtype))


class SplitLinear:
    """Siblings of one input that cannot share a weight (other schemes, other static scales): run apart, joined."""

    def __init__(self, parts: Sequence["Linear"]) -> None:
        self.parts = parts
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.kernel = " + ".join(sorted({part.kernel for part in parts}))

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


class FixedRowsLinear:
    """Another linear, always called with ROWS rows: libraries pick their order of summation by the number of rows."""

    ROWS = 32

    def __init__(self, inner: "Linear") -> None:
        self.inner = inner
        self.weight = getattr(inner, "weight", None)
        self.num_bytes = inner.num_bytes
        self.kernel = f"{inner.kernel}, {self.ROWS} rows at a time"

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % self.ROWS))
        return torch.cat([self.inner(rows) for rows in padded.split(self.ROWS)])[:num_rows]


Linear = (
    FixedRowsLinear
    | DenseLinear
    | NativeLinear
    | WeightOnlyLinear
    | PackedInt4Linear
    | QuantizedActivationLinear
    | SplitLinear
)


def make_linear(
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype,
    native: bool = False,
    int8_activations: bool = False,
) -> Linear:
    """One linear for siblings that read the same input (q/k/v, gate/up), their outputs one after the other.

    native: by our own kernels, where they run such a weight; int8_activations: these round what an integer weight
    multiplies."""
    bias = None if biases[0] is None else torch.cat(list(biases)).to(dtype)
    if all(isinstance(weight, Tensor) for weight in weights):
        dense = weights[0].to(dtype) if len(weights) == 1 else torch.cat([weight.to(dtype) for weight in weights])
        return NativeLinear(dense, bias) if native and NativeLinear.runs(dense, dtype) else DenseLinear(dense, bias)
    are_packed = all(isinstance(weight, QuantizedWeight) for weight in weights)
    merged = stack_rows(weights) if are_packed else None
    if merged is None:
        return SplitLinear(
            [make_linear([w], [b], dtype, native, int8_activations) for w, b in zip(weights, biases, strict=True)]
        )
    if native and NativeLinear.runs(merged, dtype):
        return NativeLinear(merged, bias, int8_activations)
    if native and triton_runs(merged.values.device.type):
        # The one place that needs the package triton before a GPU's program does.
        from llmq.runtime.layers.triton_linear import triton_linear

        if (linear := triton_linear(merged, bias, dtype)) is not None:
            return linear
    if merged.scheme.activation is not None:
        rounds = QuantizedActivationLinear if QuantizedActivationLinear.runs(merged) else RoundedInputLinear
        return rounds(merged, bias, dtype)
    if PackedInt4Linear.runs(merged, dtype):
        return PackedInt4Linear(merged, bias, dtype)
    return (PlaneLinear if PlaneLinear.runs(merged) else WeightOnlyLinear)(merged, bias, dtype)
