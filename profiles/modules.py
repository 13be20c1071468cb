"""The tensors of a checkpoint as modules: a linear is one thing, whether it is stored as one tensor or as four."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from llmq.profiles.safetensors_file import DTYPE_BITS, TensorInfo

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_WORDS = {
    "BF16": "bf16",
    "F16": "fp16",
    "F32": "fp32",
    "F64": "fp64",
    "F8_E4M3": "fp8",
    "F8_E5M2": "fp8 e5m2",
    "I8": "int8",
}

_ORDER = (
    *("input_layernorm", "qkv_proj", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "self_attn", "o_proj"),
    *("post_attention_layernorm", "pre_feedforward_layernorm", "gate", "gate_proj", "up_proj", "gate_up_proj"),
    *("w1", "w3", "c_fc", "down_proj", "w2", "c_proj", "post_feedforward_layernorm"),
)


@dataclass(frozen=True)
class Module:
    """What lies under one name in a checkpoint: `tensors` by their last word ("weight", "weight_packed", "bias")."""

    name: str
    tensors: dict[str, TensorInfo]
    layout: str  # how the weight is stored, from the tensors themselves: "bf16", "int4 g128, packed"
    shape: tuple[int, ...]  # of the weight when it is unpacked: a linear's is [out_features, in_features]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def num_weights(self) -> int:
        return prod(self.shape) if self.shape else 0

    @property
    def layer(self) -> int | None:
        match = _LAYER.search(self.name)
        return int(match.group(1)) if match else None

    @property
    def kind(self) -> str:
        """The name without its layer: self_attn.q_proj."""
        match = _LAYER.search(self.name)
        return self.name[match.end() :] if match else self.name

    @property
    def is_linear(self) -> bool:
        return len(self.shape) == 2 and "embed" not in self.name

    @property
    def is_quantized(self) -> bool:
        return bool(self.tensors.keys() - {"weight", "bias"}) and self.is_linear


def modules_of(tensors: Iterable[TensorInfo], quantization: dict[str, Any] | None) -> list[Module]:
    """Group tensors by module, in the order of computation."""
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for tensor in tensors:
        name, _, last = tensor.name.rpartition(".")
        grouped.setdefault(name, {})[last] = tensor
    modules = [Module(name, parts, *_storage(name, parts, quantization or {})) for name, parts in grouped.items()]
    return sorted(modules, key=_place)


def _place(module: Module) -> tuple[int, int, int]:
    """Embedding, layers in number order, final norm, head; inside a layer in the order of computation."""
    words = [place for place, word in enumerate(_ORDER) if module.kind.rpartition(".")[2] == word]
    group = 1 if module.layer is not None else 0 if "embed" in module.name else 3 if "head" in module.name else 2
    return group, module.layer or 0, words[0] if words else len(_ORDER)


def _storage(name: str, parts: dict[str, TensorInfo], quantization: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Layout and unpacked shape of a module's weight, from the shapes of its tensors."""
    if "weight" in parts:
        weight = parts["weight"]
        return _WORDS.get(weight.dtype, weight.dtype.lower()) + _extent(parts, weight.shape[-1]), weight.shape
    if "weight_packed" in parts:
        packed = parts["weight_packed"]
        bits, width = _unpacked(packed, parts.get("weight_scale"), _declared(name, quantization))
        number = "int" if packed.dtype == "I32" else "fp"
        return f"{number}{bits}{_extent(parts, width)}, packed", (packed.shape[0], width)
    if "qweight" in parts:
        return _older_layout(parts, quantization)
    return "", ()


def _extent(parts: dict[str, TensorInfo], width: int) -> str:
    """What shares a scale, from the shape of weight_scale: [rows, groups], [rows, 1] or [1]."""
    scale = parts.get("weight_scale")
    if scale is None:
        return " in blocks" if "weight_scale_inv" in parts else ""
    if scale.num_elements == 1:
        return " per tensor"
    if len(scale.shape) == 2 and scale.shape[1] > 1:
        return f" g{width // scale.shape[1]}"
    return " per channel"


def _older_layout(parts: dict[str, TensorInfo], quantization: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """AutoGPTQ packs qweight along the input, [in / 8, out]; AutoAWQ along the output, [in, out / 8]."""
    bits = _bits(quantization)
    rows, columns = parts["qweight"].shape
    out_features = parts["scales"].shape[1]
    in_features = rows if columns * 32 == out_features * bits else rows * 32 // bits
    method = "awq" if in_features == rows else "gptq"
    group = in_features // parts["scales"].shape[0]
    order = ", activation order" if quantization.get("desc_act") else ""
    return f"int{bits} g{group}, {method} packed{order}", (out_features, in_features)


def _unpacked(packed: TensorInfo, scale: TensorInfo | None, declared: list[tuple[int, int | None]]) -> tuple[int, int]:
    """Bits of a number and numbers in a row: those declared that the number of scales agrees with, else the first."""
    row_bits = packed.shape[1] * DTYPE_BITS[packed.dtype]
    groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
    agreeing = [bits for bits, size in declared if groups == (row_bits // bits // size if size else 1)]
    bits = (agreeing or [bits for bits, _ in declared])[0]
    return bits, row_bits // bits


def _declared(name: str, quantization: dict[str, Any]) -> list[tuple[int, int | None]]:
    """(bits, group size or None) that a packed module may have by its quantization_config."""
    if quantization.get("quant_method") == "gguf":
        kind = quantization.get("modules", {}).get(name, "Q4_0")  # Q6_K: 6 bits
        return [(int(kind[1]), 16 if kind in ("Q2_K", "Q3_K", "Q6_K") else 32)]
    groups = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    sizes = [(int(group["num_bits"]), group.get("group_size")) for group in groups if "num_bits" in group]
    return [(bits, size if size and size > 0 else None) for bits, size in sizes] or [(_bits(quantization), None)]


def _bits(quantization: dict[str, Any]) -> int:
    return int(quantization.get("bits") or 4)
