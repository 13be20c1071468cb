"""Linears by Triton kernels, on GPUs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.runtime.kernels import interpreted
from llmq.runtime.kernels.triton.launch import Target
from llmq.runtime.kernels.triton.row_kernels import MOST_FEATURES, round_rows
from llmq.runtime.kernels.triton.weight_only import FP8, INT4, INT8, ChunkedWeight, multiply

_NAMES = {INT4: "int4", INT8: "int8", FP8: "fp8"}
# torch's int8 product on CUDA takes no fewer rows.
_INT8_ROWS = 32


class TritonWeightOnlyLinear:
    """A weight in 4 or 8 bits times activations as they come: W4A16, W8A16, and FP8 where nothing multiplies FP8."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self.weight = ChunkedWeight.of(weight)
        self.column_order, self.bias = weight.column_order, bias
        self.num_bytes = self.weight.num_bytes + sum(t.nbytes for t in (bias, weight.column_order) if t is not None)
        self.kernel = f"triton {_NAMES[self.weight.format]} × 16 bit"

    def __call__(self, x: Tensor) -> Tensor:
        if self.column_order is not None:
            x = x.index_select(1, self.column_order)
        elif x.stride(1) != 1:
            x = x.contiguous()
        y = x.new_empty(x.shape[0], self.weight.shape[0])
        for launch in multiply(x, self.weight, self.bias, y, Target.of(x.device)):
            launch.run()
        return y


class TritonRoundedLinear:
    """W8A8: the input rounded to int8 or e4m3 by a kernel, per token or by the checkpoint's scale, the product by
    torch's own in that format, rescaled by both scales: y = (q_x q_wᵀ) · s_x · s_w + b."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self.values, self.bias = weight.values, bias
        self.scale = weight.scale.float().flatten()  # [out_features] or [1]
        self.input_scale = None if weight.input_scale is None else weight.input_scale.float().reshape(1)
        self.is_int8 = weight.scheme.kind == "int"
        self.num_bytes = weight.num_bytes
        self.kernel = f"triton rounding, torch {'int8' if self.is_int8 else 'fp8'}"
        self._one = torch.ones((), device=weight.values.device)

    @staticmethod
    def runs(weight: QuantizedWeight) -> bool:
        """Whether torch multiplies it: one scale a row or for all, and sizes that its products take."""
        scheme = weight.scheme
        return (
            scheme.layout != "pack-quantized"
            and scheme.strategy in ("tensor", "channel")
            and scheme.activation.group_size is None
            and scheme.activation.kind == scheme.kind
            and weight.zero_point is None
            and weight.in_features % 16 == weight.out_features % 16 == 0
            and weight.in_features <= MOST_FEATURES
        )

    def __call__(self, x: Tensor) -> Tensor:
        q = torch.empty(x.shape, dtype=torch.int8 if self.is_int8 else torch.uint8, device=x.device)
        scale = self.input_scale
        if scale is None:
            scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        x = x if x.stride(1) == 1 else x.contiguous()
        round_rows(x, q, None if scale is self.input_scale else scale, self.input_scale).run()
        if self.is_int8:
            padded = F.pad(q, (0, 0, 0, max(0, _INT8_ROWS - len(q))))
            y = torch._int_mm(padded, self.values.t())[: len(q)].float()
        else:
            # Scales of one a row would want bf16 for a result; the float32 sums are scaled here.
            numbers = q.view(torch.float8_e4m3fn)
            y = torch._scaled_mm(
                numbers, self.values.t(), scale_a=self._one, scale_b=self._one, out_dtype=torch.float32
            )
        y = y * scale[:, None] * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def triton_linear(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> TritonWeightOnlyLinear | TritonRoundedLinear | None:
    """The linear that runs a weight on its device; None where there is no kernel for it.

    An FP8 checkpoint on a GPU without FP8 products (before compute capability 8.9) keeps its activations in 16 bits.
    """
    if dtype == torch.float32 and not interpreted():
        return None
    scheme = weight.scheme
    if scheme.activation is None:
        return TritonWeightOnlyLinear(weight, bias) if ChunkedWeight.runs(weight) else None
    is_fp8 = scheme.kind == "float"
    if is_fp8 and not Target.of(weight.values.device).has_fp8_products:
        is_8_bit = scheme.bits == scheme.activation.bits == 8
        return TritonWeightOnlyLinear(weight, bias) if is_8_bit and ChunkedWeight.runs(weight) else None
    return TritonRoundedLinear(weight, bias) if TritonRoundedLinear.runs(weight) else None
