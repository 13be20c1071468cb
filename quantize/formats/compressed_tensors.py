"""The compressed-tensors layout (llm-compressor, vLLM, transformers): its tensors, read and written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmq.quantize.formats.base import GetTensor, Range, get_all, part_of
from llmq.quantize.formats.column_order import column_order, group_index, sorted_columns, stored_values
from llmq.quantize.formats.compressed_tensors_config import (
    ConfigGroup,
    disk_layout,
    group_config,
    kv_config,
    matches,
    read_group,
    read_kv_scheme,
    scheme_of,
)
from llmq.quantize.formats.packing import pack_int32, pack_unsigned, unpack_int32
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import FormatError, KVCacheScheme, WeightScheme

__all__ = ["QUANT_METHOD", "CompressedTensorsWriter", "ConfigGroup", "QuantizationConfig", "matches", "to_tensors"]

QUANT_METHOD = "compressed-tensors"


@dataclass(frozen=True)
class QuantizationConfig:
    """A checkpoint's `quantization_config`, understood."""

    groups: tuple[ConfigGroup, ...]
    ignore: tuple[str, ...] = ()
    kv_cache_scheme: KVCacheScheme | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuantizationConfig":
        """Read the dict under `quantization_config`. Raises FormatError for what is not supported, by name."""
        method = config.get("quant_method")
        if method != QUANT_METHOD:
            raise FormatError(f"quantization_config: quant_method {method!r} is not supported ({QUANT_METHOD!r} is)")
        status = config.get("quantization_status", "compressed")
        if status != "compressed":
            raise FormatError(f"quantization_config: quantization_status {status!r} is not supported: not compressed")
        for key in ("sparsity_config", "transform_config"):
            if _is_set(config.get(key)):
                raise FormatError(f"quantization_config: a {key} is not supported")
        groups = tuple(
            read_group(name, group, config.get("format")) for name, group in (config.get("config_groups") or {}).items()
        )
        kv = config.get("kv_cache_scheme")
        if not groups and kv is None:
            raise FormatError("quantization_config: it has no config_groups")
        return cls(groups, tuple(config.get("ignore") or ()), None if kv is None else read_kv_scheme(kv))

    def scheme_for(self, module_name: str, class_name: str = "Linear") -> WeightScheme | None:
        """The scheme of a module by its name in the checkpoint; None if it is left in 16 bit."""
        return scheme_of(self.groups, self.ignore, module_name, class_name)

    @staticmethod
    def tensor_names(module_name: str, scheme: WeightScheme) -> tuple[str, ...]:
        """The tensors that make one linear's weight (a bias, if any, is apart)."""
        layout = disk_layout(scheme)
        if layout == "nvfp4-pack-quantized":
            suffixes = ["weight_packed", "weight_scale", "weight_global_scale"]
        elif layout == "mxfp4-pack-quantized":
            suffixes = ["weight_packed", "weight_scale"]
        elif scheme.layout == "pack-quantized":
            suffixes = ["weight_packed", "weight_scale", "weight_shape"]
        else:
            suffixes = ["weight", "weight_scale"]
        if not scheme.symmetric:
            suffixes.append("weight_zero_point")
        if scheme.has_column_groups:
            suffixes.append("weight_g_idx")
        if scheme.activation is not None and (scheme.activation.bits, scheme.activation.group_size) == (4, 16):
            suffixes.append("input_global_scale")
        elif scheme.activation is not None and not scheme.activation.dynamic:
            suffixes.append("input_scale")
        return tuple(f"{module_name}.{suffix}" for suffix in suffixes)

    def read(
        self, module_name: str, get_tensor: GetTensor, rows: Range | None = None, columns: Range | None = None
    ) -> QuantizedWeight:
        """One linear, packed as stored, or a part of it (`CheckpointFormat.read`)."""
        scheme = self.scheme_for(module_name)
        if scheme is None:
            raise FormatError(f"{module_name} is not quantized in this checkpoint")
        stored = get_all(module_name, self.tensor_names(module_name, scheme), scheme, get_tensor)
        return part_of(_assemble(module_name, scheme, stored), rows, columns)

    def may_ignore(self, tensor_name: str, get_tensor: GetTensor) -> bool:
        # Of the KV dtype that the checkpoint suggests, when another one is served.
        return self.kv_cache_scheme is not None and tensor_name.endswith((".k_scale", ".v_scale"))

    def to_config(self) -> dict[str, Any]:
        """The dict to store under `quantization_config`, as llm-compressor writes it."""
        layouts = {disk_layout(group.scheme) for group in self.groups}
        return {
            "quant_method": QUANT_METHOD,
            "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {f"group_{index}": group_config(group) for index, group in enumerate(self.groups)},
            "ignore": list(self.ignore),
            "kv_cache_scheme": None if self.kv_cache_scheme is None else kv_config(self.kv_cache_scheme),
            "global_compression_ratio": None,
        }


def _is_set(section: dict[str, Any] | None) -> bool:
    """Whether a sparsity or transform section asks for anything ({} and `format: dense` do not)."""
    return bool(section) and section.get("format") != "dense" and section.get("config_groups") != {}


def _assemble(module_name: str, scheme: WeightScheme, stored: dict[str, Tensor]) -> QuantizedWeight:
    values, shape = _values(module_name, scheme, stored)
    if scheme.strategy == "group" and shape[1] % scheme.group_size:
        raise FormatError(
            f"{module_name}: group size {scheme.group_size} does not divide its {shape[1]} input features"
        )
    scale_shape = scheme.scale_shape(shape)
    scale = stored["weight_scale"]
    if disk_layout(scheme) == "mxfp4-pack-quantized":
        scale = scale.view(torch.float8_e8m0fnu)  # powers of two, stored as bytes
    if scale.numel() != scale_shape[0] * scale_shape[1]:
        raise FormatError(f"{module_name}.weight_scale is {list(scale.shape)}, its scheme asks {list(scale_shape)}")
    zero_point = stored.get("weight_zero_point")
    if zero_point is not None:
        if scheme.layout == "pack-quantized" and zero_point.dtype == torch.int32:
            zero_point = unpack_int32(zero_point.T.contiguous(), scheme.bits, shape[0]).T.contiguous()
        zero_point = zero_point.to(torch.int8).view(scale_shape)
    order = None
    if "weight_g_idx" in stored:
        order = column_order(module_name, scheme, shape[1], stored["weight_g_idx"])
        values = values if order is None else sorted_columns(values, scheme.bits, order)
    outer, input_scale = stored.get("weight_global_scale"), stored.get("input_scale")
    if "input_global_scale" in stored:
        input_scale = stored["input_global_scale"]
    return QuantizedWeight(
        scheme=scheme,
        shape=shape,
        values=values,
        scale=scale.view(scale_shape),
        zero_point=zero_point,
        input_scale=None if input_scale is None else input_scale.to(torch.float32).view(()),
        column_order=order,
        # NVFP4 divides by its global scale. In float64, whose inverse's inverse is the same float32 again.
        outer_scale=None if outer is None else 1 / outer.to(torch.float64).view(1, 1),
    )


def _values(module_name: str, scheme: WeightScheme, stored: dict[str, Tensor]) -> tuple[Tensor, tuple[int, int]]:
    """The numbers and the shape of the weight that they make."""
    if scheme.layout != "pack-quantized":
        return stored["weight"], tuple(stored["weight"].shape)
    packed = stored["weight_packed"]
    if "weight_shape" not in stored:  # 4-bit floats: two codes a byte
        return packed.contiguous().view(torch.int32), (packed.shape[0], packed.shape[1] * 2)
    shape = tuple(int(size) for size in stored["weight_shape"])
    expected = (shape[0], -(-shape[1] * scheme.bits // 32))
    per_word = 32 // scheme.bits
    if 32 % scheme.bits and tuple(packed.shape) == (shape[0], -(-shape[1] // per_word)) != expected:
        # Older versions let no number go across words: 10 of 3 bits in each.
        spread = torch.stack([(packed >> (scheme.bits * n)) & ((1 << scheme.bits) - 1) for n in range(per_word)], dim=2)
        return pack_unsigned(spread.view(shape[0], -1)[:, : shape[1]], scheme.bits), shape
    if tuple(packed.shape) != expected:
        raise FormatError(
            f"{module_name}.weight_packed is {list(packed.shape)}, its weight_shape asks {list(expected)}"
        )
    return packed, shape


class CompressedTensorsWriter:
    """compressed-tensors as llm-compressor writes it: read by vLLM, transformers and SGLang."""

    name = QUANT_METHOD

    def check(self, scheme: WeightScheme, shape: tuple[int, int] | None = None) -> None:
        read_group("config_groups.group_0", group_config(ConfigGroup(("Linear",), scheme)), None)
        if shape is not None and scheme.strategy == "group" and shape[1] % scheme.group_size:
            raise FormatError(f"group size {scheme.group_size} does not divide {shape[1]} input features")

    def tensors(self, module_name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        return to_tensors(module_name, weight)

    def config(
        self,
        schemes: Mapping[str, WeightScheme],
        left_alone: Sequence[str],
        kv_cache_scheme: KVCacheScheme | None = None,
    ) -> dict[str, Any]:
        by_scheme: dict[WeightScheme, list[str]] = {}
        for name, scheme in schemes.items():
            by_scheme.setdefault(scheme, []).append(name)
        if len(by_scheme) == 1:
            groups = (ConfigGroup(("Linear",), next(iter(by_scheme))),)
        else:
            groups = tuple(ConfigGroup(tuple(sorted(names)), scheme) for scheme, names in by_scheme.items())
        return QuantizationConfig(groups, tuple(sorted(left_alone)), kv_cache_scheme).to_config()


def to_tensors(module_name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors to store for one linear: the inverse of `QuantizationConfig.read`."""
    scheme, values = weight.scheme, stored_values(weight)
    if scheme.kind == "float" and scheme.bits == 4:
        tensors = {"weight_packed": values.contiguous().view(torch.uint8)}
        if weight.outer_scale is not None:
            tensors["weight_global_scale"] = (1 / weight.outer_scale.double()).float().view(1)
    elif scheme.layout == "pack-quantized":
        tensors = {"weight_packed": values, "weight_shape": torch.tensor(weight.shape, dtype=torch.int64)}
    else:
        tensors = {"weight": values}
    # A scale for the whole tensor is stored as a vector of one.
    tensors["weight_scale"] = weight.scale.view(-1) if scheme.strategy == "tensor" else weight.scale
    if weight.scale.dtype == torch.float8_e8m0fnu:
        tensors["weight_scale"] = weight.scale.view(torch.uint8)
    if weight.zero_point is not None:
        tensors["weight_zero_point"] = weight.zero_point
        if scheme.layout == "pack-quantized":  # packed along the output dimension
            tensors["weight_zero_point"] = pack_int32(weight.zero_point.T, scheme.bits).T
    if scheme.has_column_groups:
        tensors["weight_g_idx"] = group_index(weight)
    if weight.input_scale is not None and scheme.activation.bits == 4:
        tensors["input_global_scale"] = weight.input_scale.view(1)
    elif weight.input_scale is not None:
        tensors["input_scale"] = weight.input_scale.to(weight.scale.dtype).view(1)
    return {f"{module_name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
