"""The compressed-tensors layout (llm-compressor, vLLM, transformers): its `quantization_config` and its tensors.

A config has groups, each a scheme for the modules its `targets` name (an exact name, `re:` and a pattern, or a class
such as `Linear`), and an `ignore` list of the same kind. What this reader cannot honour in full it refuses by name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight, pack_int32, unpack_int32
from llmq.quantize.formats.scheme import ActivationScheme, FormatError, KVCacheScheme, WeightScheme

QUANT_METHOD = "compressed-tensors"
READABLE_LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class ConfigGroup:
    targets: tuple[str, ...]
    scheme: WeightScheme


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
            _read_group(name, group, config.get("format"))
            for name, group in (config.get("config_groups") or {}).items()
        )
        kv = config.get("kv_cache_scheme")
        if not groups and kv is None:
            raise FormatError("quantization_config: it has no config_groups")
        return cls(groups, tuple(config.get("ignore") or ()), None if kv is None else _read_kv_scheme(kv))

    def scheme_for(self, module_name: str, class_name: str = "Linear") -> WeightScheme | None:
        """The scheme of a module by its name in the checkpoint; None if it is left in 16 bit.

        As in compressed-tensors an exact name wins over a pattern, a pattern over a class.
        """
        if any(_matches(pattern, module_name, class_name) for pattern in self.ignore):
            return None
        by_target = {target: group.scheme for group in reversed(self.groups) for target in group.targets}
        for target in sorted(by_target, key=lambda t: (_specificity(t, module_name), t)):
            if _matches(target, module_name, class_name):
                return by_target[target]
        return None

    @staticmethod
    def tensor_names(module_name: str, scheme: WeightScheme) -> tuple[str, ...]:
        """The tensors that make one linear's weight (a bias, if any, is apart)."""
        if scheme.layout == "pack-quantized":
            suffixes = ["weight_packed", "weight_scale", "weight_shape"]
        else:
            suffixes = ["weight", "weight_scale"]
        if not scheme.symmetric:
            suffixes.append("weight_zero_point")
        if scheme.has_column_groups:
            suffixes.append("weight_g_idx")
        if scheme.activation is not None and not scheme.activation.dynamic:
            suffixes.append("input_scale")
        return tuple(f"{module_name}.{suffix}" for suffix in suffixes)

    def read(self, module_name: str, get_tensor: Callable[[str], Tensor]) -> QuantizedWeight:
        """One linear, packed as stored. `get_tensor(name)` raises KeyError for a tensor that is not there."""
        scheme = self.scheme_for(module_name)
        if scheme is None:
            raise FormatError(f"{module_name} is not quantized in this checkpoint")
        stored = {}
        for name in self.tensor_names(module_name, scheme):
            try:
                stored[name.rsplit(".", 1)[1]] = get_tensor(name)
            except KeyError:
                raise FormatError(f"the checkpoint lacks {name}, which its scheme ({scheme.name}) needs") from None
        return _assemble(module_name, scheme, stored)

    def to_config(self) -> dict[str, Any]:
        """The dict to store under `quantization_config`, as llm-compressor writes it."""
        layouts = {group.scheme.layout for group in self.groups}
        return {
            "quant_method": QUANT_METHOD,
            "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {f"group_{index}": _group_config(group) for index, group in enumerate(self.groups)},
            "ignore": list(self.ignore),
            "kv_cache_scheme": None if self.kv_cache_scheme is None else _kv_config(self.kv_cache_scheme),
            "global_compression_ratio": None,
        }


def to_tensors(module_name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors to store for one linear: the inverse of `QuantizationConfig.read`."""
    if weight.scheme.layout == "pack-quantized":
        tensors = {"weight_packed": weight.values, "weight_shape": torch.tensor(weight.shape, dtype=torch.int64)}
    else:
        tensors = {"weight": weight.values}
    tensors["weight_scale"] = weight.scale
    if weight.zero_point is not None:
        tensors["weight_zero_point"] = weight.zero_point
        if weight.scheme.layout == "pack-quantized":  # packed along the output dimension
            tensors["weight_zero_point"] = pack_int32(weight.zero_point.T, weight.scheme.bits).T
    if weight.column_group is not None:
        tensors["weight_g_idx"] = weight.column_group.to(torch.int32)
    if weight.input_scale is not None:
        tensors["input_scale"] = weight.input_scale.to(weight.scale.dtype).view(1)
    return {f"{module_name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}


class CompressedTensorsWriter:
    """compressed-tensors as llm-compressor writes it: read by vLLM, transformers and SGLang."""

    name = QUANT_METHOD

    def check(self, scheme: WeightScheme, shape: tuple[int, int] | None = None) -> None:
        _read_group("config_groups.group_0", _group_config(ConfigGroup(("Linear",), scheme)), None)
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


def matches(patterns: Iterable[str], module_name: str, class_name: str = "Linear") -> bool:
    """Whether any pattern (an exact name, `re:` and a regular expression, or a class) names the module."""
    return any(_matches(pattern, module_name, class_name) for pattern in patterns)


def _matches(pattern: str, module_name: str, class_name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module_name) is not None
    return pattern in (module_name, class_name)


def _specificity(target: str, module_name: str) -> int:
    if target == module_name:
        return 0
    return 1 if target.startswith("re:") else 2


def _is_set(section: dict[str, Any] | None) -> bool:
    """Whether a sparsity or transform section asks for anything ({} and `format: dense` do not)."""
    return bool(section) and section.get("format") != "dense" and section.get("config_groups") != {}


def _read_group(name: str, group: dict[str, Any], default_layout: str | None) -> ConfigGroup:
    where = f"quantization_config.{name}"
    layout = group.get("format") or default_layout
    if layout not in READABLE_LAYOUTS:
        raise FormatError(f"{where}: format {layout!r} is not supported ({', '.join(READABLE_LAYOUTS)} are)")
    if group.get("output_activations"):
        raise FormatError(f"{where}: quantized output activations are not supported")
    weights = group.get("weights")
    if not weights:
        raise FormatError(f"{where}: a group that does not quantize weights is not supported")
    return ConfigGroup(
        tuple(group["targets"]), _read_weight_scheme(where, weights, layout, group.get("input_activations"))
    )


def _read_weight_scheme(where: str, weights: dict, layout: str, activations: dict | None) -> WeightScheme:
    kind, bits, group_size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
    strategy = weights.get("strategy") or {None: "tensor", -1: "channel"}.get(group_size, "group")
    if strategy not in ("tensor", "channel", "group"):
        raise FormatError(f"{where}: weight strategy {strategy!r} is not supported (tensor, channel and group are)")
    if layout == "naive-quantized":
        layout = "int-quantized" if kind == "int" else "float-quantized"
    legal_bits = {"pack-quantized": ("int", (4, 8)), "int-quantized": ("int", (8,)), "float-quantized": ("float", (8,))}
    if kind != legal_bits[layout][0] or bits not in legal_bits[layout][1]:
        raise FormatError(f"{where}: {bits}-bit {kind} weights in the {layout} format are not supported")
    if weights.get("dynamic"):
        raise FormatError(f"{where}: dynamically quantized weights are not supported")
    return WeightScheme(
        kind=kind,
        bits=bits,
        strategy=strategy,
        group_size=group_size if strategy == "group" else None,
        symmetric=weights.get("symmetric", True),
        activation=_read_activation_scheme(where, activations) if activations else None,
        layout=layout,
        has_column_groups=weights.get("actorder") in ("group", "dynamic", True),
    )


def _read_activation_scheme(where: str, activations: dict) -> ActivationScheme:
    kind, bits, dynamic = activations.get("type", "int"), activations.get("num_bits", 8), activations.get("dynamic")
    strategy = activations.get("strategy") or ("token" if dynamic else "tensor")
    is_per_token = strategy == "token" and dynamic is True
    is_static_fp8 = strategy == "tensor" and not dynamic and kind == "float"
    if bits != 8 or not activations.get("symmetric", True) or not (is_per_token or is_static_fp8):
        sign = "symmetric" if activations.get("symmetric", True) else "asymmetric"
        raise FormatError(
            f"{where}: {bits}-bit {kind} {sign} activations, {'dynamic' if dynamic else 'static'} per {strategy}, "
            "are not supported (8-bit symmetric ones per token dynamic, or float per tensor static, are)"
        )
    return ActivationScheme(kind, bits, dynamic=bool(dynamic))


def _read_kv_scheme(kv: dict[str, Any]) -> KVCacheScheme:
    if kv.get("num_bits") != 8:
        raise FormatError(f"quantization_config.kv_cache_scheme: {kv.get('num_bits')} bits are not supported (8 are)")
    return KVCacheScheme(
        kind=kv.get("type", "float"),
        bits=8,
        strategy=kv.get("strategy") or "tensor",
        dynamic=bool(kv.get("dynamic")),
        symmetric=kv.get("symmetric", True),
    )


def _assemble(module_name: str, scheme: WeightScheme, stored: dict[str, Tensor]) -> QuantizedWeight:
    if scheme.layout == "pack-quantized":
        values = stored["weight_packed"]
        shape = tuple(int(size) for size in stored["weight_shape"])
        expected = (shape[0], -(-shape[1] * scheme.bits // 32))
        if tuple(values.shape) != expected:
            raise FormatError(
                f"{module_name}.weight_packed is {list(values.shape)}, its weight_shape asks {list(expected)}"
            )
    else:
        values = stored["weight"]
        shape = tuple(values.shape)
    if scheme.strategy == "group" and shape[1] % scheme.group_size:
        raise FormatError(
            f"{module_name}: group size {scheme.group_size} does not divide its {shape[1]} input features"
        )
    scale_shape = (1, 1) if scheme.strategy == "tensor" else (shape[0], scheme.num_groups(shape[1]))
    scale = stored["weight_scale"]
    if scale.numel() != scale_shape[0] * scale_shape[1]:
        raise FormatError(f"{module_name}.weight_scale is {list(scale.shape)}, its scheme asks {list(scale_shape)}")
    zero_point = stored.get("weight_zero_point")
    if zero_point is not None:
        if scheme.layout == "pack-quantized" and zero_point.dtype == torch.int32:
            zero_point = unpack_int32(zero_point.T.contiguous(), scheme.bits, shape[0]).T.contiguous()
        zero_point = zero_point.to(torch.int8).view(scale_shape)
    column_group = stored.get("weight_g_idx")
    input_scale = stored.get("input_scale")
    return QuantizedWeight(
        scheme=scheme,
        shape=shape,
        values=values,
        scale=scale.view(scale_shape),
        zero_point=zero_point,
        input_scale=None if input_scale is None else input_scale.to(torch.float32).view(()),
        column_group=None if column_group is None else column_group.to(torch.int64),
    )


def _group_config(group: ConfigGroup) -> dict[str, Any]:
    scheme, activation = group.scheme, group.scheme.activation
    weights = _quantization_args(scheme.kind, scheme.bits, scheme.strategy, scheme.symmetric, dynamic=False)
    weights["group_size"] = scheme.group_size
    inputs = None
    if activation is not None:
        strategy = "token" if activation.dynamic else "tensor"
        inputs = _quantization_args(activation.kind, activation.bits, strategy, True, dynamic=activation.dynamic)
    return {
        "targets": list(group.targets),
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": scheme.layout,
    }


def _kv_config(kv: KVCacheScheme) -> dict[str, Any]:
    return _quantization_args(kv.kind, kv.bits, kv.strategy, kv.symmetric, dynamic=kv.dynamic)


def _quantization_args(kind: str, bits: int, strategy: str, symmetric: bool, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": None,
        "dynamic": dynamic,
        "actorder": None,
        "block_structure": None,
        "observer": None,
        "observer_kwargs": {},
    }
