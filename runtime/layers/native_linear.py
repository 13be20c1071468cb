"""Linears by our own kernels: `runtime/kernels/native`."""

from typing import Any

import torch
from torch import Tensor

from llmq.quantize.formats.packing import unpack_unsigned
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import ActivationScheme, WeightScheme
from llmq.runtime.kernels import native


class NativeLinear:
    """y = x Wᵀ + b on a CPU, in bf16: of a dense weight, of integers of 2 to 8 bits that stay packed, in 3, 4 or 8, or
    of e4m3 numbers.

    Exact: the input's bf16 numbers times the weight's, summed in float32. Rounded: input and weight are multiplied in
    int8, as a W8A8 checkpoint asks, or where `int8_activations` does, with one scale of the input for each group of the
    weight; or the input is rounded to e4m3 as an FP8 checkpoint asks, and the product of two e4m3 numbers, which bf16
    holds exactly, is summed in float32. A row's result is the same to the last bit whatever rows are beside it.
    """

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, int8_activations: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.tensors: dict[str, Tensor] = {}  # what `packed` points into
        if bias is not None:
            self.tensors["bias"] = bias.float().contiguous()
        self.activations, self.input_scale, outer_shift = native.Activations.exact, 0.0, 0
        if isinstance(weight, Tensor):
            numbers, scales, group_size = native.Numbers.bf16, native.Scales.none, self.in_features
            self.tensors["numbers"] = _packed(numbers, weight.contiguous())
        else:
            weight = weight.spread_blocks()
            scheme, bits = weight.scheme, held_bits(weight.scheme.bits)
            group_size = scheme.group_size if scheme.strategy == "group" else self.in_features
            if scheme.kind == "float":
                numbers, rows = native.Numbers.fp8, weight.values.contiguous().view(torch.uint8)
            else:
                numbers = getattr(native.Numbers, f"int{bits}")
                rows = _from_zero(weight, bits)
            self.tensors["numbers"] = _packed(numbers, rows)
            scales = self._pack_scales(weight, bits)
            if "outer_scales" in self.tensors:
                outer_shift = (weight.scale.shape[1] // weight.outer_scale.shape[1]).bit_length() - 1
            if weight.column_order is not None:
                self.tensors["column_order"] = weight.column_order.to(torch.int32)
            if scheme.activation is not None:
                self.activations = _activations(scheme.activation)
                self.input_scale = 0.0 if weight.input_scale is None else float(weight.input_scale)
            elif int8_activations and scheme.kind == "int":
                self.activations = native.Activations.int8_group
        self._facts = {
            "shape": [self.out_features, self.in_features],
            "numbers": numbers.name,
            "scales": scales.name,
            "group_size": group_size,
            "outer_shift": outer_shift,
            "activations": self.activations.name,
            "input_scale": self.input_scale,
        }
        self._bind()

    @classmethod
    def from_packed(cls, facts: dict[str, Any], tensors: dict[str, Tensor]) -> "NativeLinear":
        """Of what `packed_facts` and `tensors` were of another, in another process perhaps."""
        linear = cls.__new__(cls)
        linear._facts, linear.tensors = facts, tensors
        linear.out_features, linear.in_features = facts["shape"]
        linear.activations = getattr(native.Activations, facts["activations"])
        linear.input_scale = facts["input_scale"]
        linear._bind()
        return linear

    @property
    def packed_facts(self) -> dict[str, Any]:
        """What it is beside its tensors, as JSON has it."""
        return self._facts

    def _bind(self) -> None:
        facts = self._facts
        self.packed = native.PackedWeight(
            getattr(native.Numbers, facts["numbers"]),
            getattr(native.Scales, facts["scales"]),
            self.out_features,
            self.in_features,
            facts["group_size"],
            outer_shift=facts["outer_shift"],
            **{name: tensor.data_ptr() for name, tensor in self.tensors.items()},
        )
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        name = self.activations.name
        rounded = "" if name == "exact" else f" × {name.split('_')[0]}"
        self.kernel = f"native {facts['numbers']}{rounded}, {native.isa()}"

    @staticmethod
    def runs(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> bool:
        if native is None or dtype != torch.bfloat16:
            return False
        if isinstance(weight, Tensor):
            return weight.device.type == "cpu"
        scheme, activation = weight.scheme, weight.scheme.activation
        is_grouped = scheme.strategy in ("group", "block")
        if weight.values.device.type != "cpu" or (is_grouped and scheme.group_size % 8):
            return False
        if scheme.kind == "float":
            is_rounded_alike = activation is None or (
                (activation.kind, activation.bits) == ("float", 8)
                and activation.group_size in (None, scheme.group_size if is_grouped else None)
            )
            return scheme.bits == 8 and is_rounded_alike and not _has_nan(weight.values)
        return (
            2 <= scheme.bits <= 8
            and scheme.strategy != "block"
            and (activation is None or (activation.kind == "int" and not is_grouped and activation.group_size is None))
        )

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """x [num_tokens, in_features] of bf16 -> [num_tokens, out_features] of `dtype`, bf16 or float32."""
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape[0], self.out_features, dtype=dtype)
        native.linear(
            self.packed,
            self.activations,
            self.input_scale,
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            y.data_ptr(),
            self.out_features,
            dtype == torch.float32,
        )
        return y

    def _pack_scales(self, weight: QuantizedWeight, bits: int) -> "native.Scales":
        if _are_small_times_outer(weight):
            self.tensors["scales"] = _by_groups(weight.scale, self.out_features, torch.int8)
            self.tensors["outer_scales"] = _by_groups(weight.outer_scale, self.out_features, torch.float16)
            if weight.offset is not None:
                self.tensors["offsets"] = _by_groups(weight.offset, self.out_features, torch.int8)
                self.tensors["outer_offsets"] = _by_groups(weight.outer_offset, self.out_features, torch.float16)
            return native.Scales.int8
        scale, offset = weight.scales(), weight.offsets()
        dtype = _narrowest(scale) if offset is None else _narrowest(torch.cat((scale, offset)))
        self.tensors["scales"] = _by_groups(scale, self.out_features, dtype)
        if offset is not None:
            self.tensors["offsets"] = _by_groups(offset, self.out_features, dtype)
        elif weight.zero_point is not None:
            # From q's signed range to u's.
            zero = weight.zero_point.to(torch.int16) + (1 << (bits - 1))
            self.tensors["zeros"] = _by_groups(zero, self.out_features, torch.uint8)
        return _SCALES[dtype]


_SCALES = (
    {}
    if native is None
    else {
        torch.bfloat16: native.Scales.bf16,
        torch.float16: native.Scales.fp16,
        torch.float32: native.Scales.fp32,
    }
)


def _are_small_times_outer(weight: QuantizedWeight) -> bool:
    """Whether scales, and offsets, are small whole numbers times a float16 that a power of two of groups share, as in
    GGUF's K blocks: kept as they come, for their products take four bytes each."""
    if weight.zero_point is not None:
        return False
    pairs = [(weight.scale, weight.outer_scale)]
    if weight.offset is not None:
        pairs.append((weight.offset, weight.outer_offset))
    if any(outer is None or inner.dtype not in (torch.int8, torch.uint8) for inner, outer in pairs):
        return False
    shared = [inner.shape[1] // outer.shape[1] for inner, outer in pairs]
    return (
        len(set(shared)) == 1
        and shared[0].bit_count() == 1
        and all(outer.dtype == torch.float16 and int(inner.max()) < 128 for inner, outer in pairs)
    )


def _activations(scheme: ActivationScheme) -> "native.Activations":
    if scheme.kind == "int":
        return native.Activations.int8_row
    return native.Activations.fp8_row if scheme.group_size is None else native.Activations.fp8_group


def _has_nan(numbers: Tensor) -> bool:
    """Of e4m3 numbers."""
    return bool((numbers.view(torch.uint8) & 0x7F == 0x7F).any())


def held_bits(bits: int) -> int:
    """In which the kernels hold an integer of `bits` bits."""
    return next(held for held in (3, 4, 8) if bits <= held)


_ROWS_AT_ONCE = 4096


def rounded_to_int8(weight: Tensor, group_size: int | None = None) -> QuantizedWeight:
    """[out, in] of floats with one scale a row in float32, or one in bf16 of each `group_size` inputs of it, which
    divides their number: max|w| / 127, symmetric, to the nearest."""
    out_features, in_features = weight.shape
    groups = 1 if group_size is None else in_features // group_size
    values = torch.empty(out_features, groups, in_features // groups, dtype=torch.int8)
    scales = torch.empty(out_features, groups, dtype=torch.float32 if group_size is None else torch.bfloat16)
    for first in range(0, out_features, _ROWS_AT_ONCE):
        rows = weight[first : first + _ROWS_AT_ONCE].float().unflatten(1, (groups, -1))
        scale = (rows.abs().amax(dim=2).clamp_(min=1e-12) / 127).to(scales.dtype)
        values[first : first + _ROWS_AT_ONCE] = (rows / scale[..., None]).round_().clamp_(-127, 127)
        scales[first : first + _ROWS_AT_ONCE] = scale
    strategy = "channel" if group_size is None else "group"
    scheme = WeightScheme("int", 8, strategy, group_size=group_size, layout="int-quantized")
    return QuantizedWeight(scheme, (out_features, in_features), values.flatten(1), scales)


def _narrowest(numbers: Tensor) -> torch.dtype:
    """The dtype of fewest bytes that holds float32 `numbers` exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return dtype
    return torch.float32


def _from_zero(weight: QuantizedWeight, bits: int) -> Tensor:
    """u, uint8 [out, in], of a number of `bits` bits: the zero of a symmetric weight is in their middle. An offset is
    that of the number as stored."""
    scheme = weight.scheme
    if scheme.layout != "pack-quantized":
        return weight.values.contiguous().view(torch.uint8) + (1 << (bits - 1))
    u = unpack_unsigned(weight.values, scheme.bits, weight.in_features).contiguous()
    if scheme.bits == bits or weight.offset is not None:
        return u
    return u.add_((1 << (bits - 1)) - (1 << (scheme.bits - 1)))


def _packed(numbers: "native.Numbers", rows: Tensor) -> Tensor:
    packed = torch.empty(native.packed_bytes(numbers, *rows.shape), dtype=torch.uint8)
    native.pack_numbers(numbers, rows.data_ptr(), *rows.shape, packed.data_ptr())
    return packed


def _by_groups(rows: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    """[out or 1, groups] -> [blocks of 16 outputs, groups, 16]"""
    rows = rows.to(dtype).expand(out_features, -1).contiguous()
    blocks = -(-out_features // 16)
    packed = torch.empty(blocks, rows.shape[1], 16, dtype=dtype)
    native.pack_groups(dtype.itemsize, rows.data_ptr(), out_features, rows.shape[1], packed.data_ptr())
    return packed
