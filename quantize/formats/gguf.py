"""Our own layout of a GGUF file's linears: what its blocks hold, each part a tensor; all else is in 16 bit.

weight_packed        int32 [out, in * bits / 32], a stream of u a row; of Q8_0 `weight`, int8 [out, in]
weight_scale         float16 [out, in / 32]; of the K blocks uint8 or int8, one a group
weight_scale_outer   float16 [out, in / 256], of the K blocks
weight_offset, weight_offset_outer   likewise, of the types that have a minimum
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from llmq.quantize.formats.base import GetTensor, Range, get_all, part_of
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import FormatError, KVCacheScheme, WeightScheme

QUANT_METHOD = "gguf"


def _plain(bits: int, has_offset: bool = False) -> WeightScheme:
    layout = "int-quantized" if bits == 8 else "pack-quantized"
    return WeightScheme("int", bits, "group", 32, not has_offset, layout=layout, has_offset=has_offset)


def _k(bits: int, group_size: int, has_offset: bool) -> WeightScheme:
    return WeightScheme("int", bits, "group", group_size, not has_offset, has_offset=has_offset)


SCHEMES: dict[str, WeightScheme] = {
    "Q4_0": _plain(4),
    "Q4_1": _plain(4, has_offset=True),
    "Q5_0": _plain(5),
    "Q5_1": _plain(5, has_offset=True),
    "Q8_0": _plain(8),
    "Q2_K": _k(2, 16, has_offset=True),
    "Q3_K": _k(3, 16, has_offset=False),
    "Q4_K": _k(4, 32, has_offset=True),
    "Q5_K": _k(5, 32, has_offset=True),
    "Q6_K": _k(6, 16, has_offset=False),
}


@dataclass(frozen=True)
class GGUFFormat:
    """Which linears are of which GGUF type."""

    types: Mapping[str, str]  # module name -> "Q4_K"
    kv_cache_scheme: KVCacheScheme | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any], tensor_names: Collection[str]) -> "GGUFFormat":
        types = config.get("modules") or {}
        if unknown := sorted(set(types.values()) - SCHEMES.keys()):
            raise FormatError(f"GGUF type {unknown[0]} is not supported ({', '.join(SCHEMES)} are)")
        return cls(types)

    def scheme_for(self, module_name: str) -> WeightScheme | None:
        kind = self.types.get(module_name)
        return None if kind is None else SCHEMES[kind]

    def tensor_names(self, module_name: str, scheme: WeightScheme) -> tuple[str, ...]:
        suffixes = ["weight" if scheme.layout == "int-quantized" else "weight_packed", "weight_scale"]
        is_k = self.types[module_name].endswith("_K")
        suffixes += ["weight_scale_outer"] * is_k
        if scheme.has_offset:
            suffixes += ["weight_offset", *["weight_offset_outer"] * is_k]
        return tuple(f"{module_name}.{suffix}" for suffix in suffixes)

    def read(
        self, module_name: str, get_tensor: GetTensor, rows: Range | None = None, columns: Range | None = None
    ) -> QuantizedWeight:
        scheme = self.scheme_for(module_name)
        if scheme is None:
            raise FormatError(f"{module_name} is not quantized in this checkpoint")
        stored = get_all(module_name, self.tensor_names(module_name, scheme), scheme, get_tensor)
        scale = stored["weight_scale"]
        weight = QuantizedWeight(
            scheme=scheme,
            shape=(scale.shape[0], scale.shape[1] * scheme.group_size),
            values=stored["weight" if scheme.layout == "int-quantized" else "weight_packed"],
            scale=scale,
            outer_scale=stored.get("weight_scale_outer"),
            offset=stored.get("weight_offset"),
            outer_offset=stored.get("weight_offset_outer"),
        )
        return part_of(weight, rows, columns)

    def may_ignore(self, tensor_name: str, get_tensor: GetTensor) -> bool:
        return False
