"""compressed-tensors' `quantization_config` <-> schemes: no tensors.

A config has groups, each a scheme for the modules its `targets` name (an exact name, `re:` and a pattern, or a class
such as `Linear`), and an `ignore` list of the same kind. What cannot be honoured in full is refused by name.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llmq.quantize.formats.scheme import ActivationScheme, FormatError, KVCacheScheme, WeightScheme

# Layout on disk -> kind and bits of the numbers in it.
_LAYOUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "pack-quantized": ("int", (2, 3, 4, 5, 6, 7, 8)),
    "int-quantized": ("int", (8,)),
    "float-quantized": ("float", (8,)),
    "nvfp4-pack-quantized": ("float", (4,)),
    "mxfp4-pack-quantized": ("float", (4,)),
}
# Of 4-bit floats: layout -> group size and the dtype of the scales.
_FP4 = {"nvfp4-pack-quantized": (16, "float8_e4m3fn"), "mxfp4-pack-quantized": (32, "uint8")}
READABLE_LAYOUTS = (*_LAYOUTS, "naive-quantized")
# strategy -> what its groups are called in our words
_STRATEGIES = {"tensor": "tensor", "channel": "channel", "group": "group", "tensor_group": "group", "block": "block"}


@dataclass(frozen=True)
class ConfigGroup:
    targets: tuple[str, ...]
    scheme: WeightScheme


def read_group(name: str, group: dict[str, Any], default_layout: str | None) -> ConfigGroup:
    where = f"quantization_config.{name}"
    layout = group.get("format") or default_layout
    if layout not in READABLE_LAYOUTS:
        raise FormatError(f"{where}: format {layout!r} is not supported ({', '.join(READABLE_LAYOUTS)} are)")
    if group.get("output_activations"):
        raise FormatError(f"{where}: quantized output activations are not supported")
    weights = group.get("weights")
    if not weights:
        raise FormatError(f"{where}: a group that does not quantize weights is not supported")
    scheme = _read_weight_scheme(where, weights, layout, group.get("input_activations"))
    return ConfigGroup(tuple(group["targets"]), scheme)


def _read_weight_scheme(where: str, weights: dict, layout: str, activations: dict | None) -> WeightScheme:
    kind, bits, group_size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
    strategy = weights.get("strategy") or {None: "tensor", -1: "channel"}.get(group_size, "group")
    if layout == "naive-quantized":
        layout = "int-quantized" if kind == "int" else "float-quantized"
    if strategy not in _STRATEGIES or (strategy == "tensor_group") != (layout == "nvfp4-pack-quantized"):
        raise FormatError(
            f"{where}: weight strategy {strategy!r} in the {layout} format is not supported ({', '.join(_STRATEGIES)} "
            "are, tensor_group for NVFP4 alone)"
        )
    _check_scale_dtype(where, weights, kind, bits)
    if kind != _LAYOUTS[layout][0] or bits not in _LAYOUTS[layout][1]:
        raise FormatError(f"{where}: {bits}-bit {kind} weights in the {layout} format are not supported")
    if layout in _FP4 and group_size != _FP4[layout][0]:
        raise FormatError(f"{where}: the {layout} format has groups of {_FP4[layout][0]}, not {group_size}")
    if weights.get("dynamic"):
        raise FormatError(f"{where}: dynamically quantized weights are not supported")
    block_rows = None
    if strategy == "block":
        if layout != "float-quantized" or not weights.get("block_structure"):
            raise FormatError(f"{where}: weight blocks are supported for 8-bit floats with a block_structure")
        block_rows, group_size = weights["block_structure"]
    return WeightScheme(
        kind=kind,
        bits=bits,
        strategy=_STRATEGIES[strategy],
        group_size=group_size if _STRATEGIES[strategy] in ("group", "block") else None,
        symmetric=weights.get("symmetric", True),
        activation=_read_activation_scheme(where, activations) if activations else None,
        layout="pack-quantized" if layout in _FP4 else layout,
        has_column_groups=weights.get("actorder") in ("group", "dynamic", True),
        block_rows=block_rows,
    )


def _read_activation_scheme(where: str, activations: dict) -> ActivationScheme:
    kind, bits, dynamic = activations.get("type", "int"), activations.get("num_bits", 8), activations.get("dynamic")
    strategy = activations.get("strategy") or ("token" if dynamic else "tensor")
    symmetric, group_size = activations.get("symmetric", True), activations.get("group_size")
    _check_scale_dtype(where, activations, kind, bits)
    is_readable = (
        symmetric
        and (kind, bits, strategy, dynamic or False)
        in (
            ("int", 8, "token", True),
            ("float", 8, "token", True),
            ("float", 8, "tensor", False),
            ("float", 8, "group", True),
            ("float", 4, "tensor_group", "local"),
            ("float", 4, "group", True),
        )
        and (bits != 4 or group_size == {"tensor_group": 16, "group": 32}[strategy])
    )
    if not is_readable:
        sign = "symmetric" if symmetric else "asymmetric"
        raise FormatError(
            f"{where}: {bits}-bit {kind} {sign} activations, {'dynamic' if dynamic else 'static'} per {strategy}, "
            "are not supported (8-bit symmetric ones per token dynamic are; 8-bit floats per tensor static, or per "
            "group dynamic; 4-bit floats as in NVFP4 and MXFP4)"
        )
    return ActivationScheme(kind, bits, bool(dynamic), group_size if strategy in ("group", "tensor_group") else None)


def _check_scale_dtype(where: str, numbers: dict, kind: str, bits: int) -> None:
    """Scales in e8m0 (the MX formats) would be read, and their inputs rounded, as something else."""
    scale_dtype = str(numbers.get("scale_dtype") or "").removeprefix("torch.")
    is_fp4 = (kind, bits) == ("float", 4) and (numbers.get("group_size"), scale_dtype) in _FP4.values()
    if scale_dtype and not is_fp4 and scale_dtype not in ("float32", "bfloat16", "float16"):
        raise FormatError(f"{where}: scales in {scale_dtype} for {bits}-bit {kind} numbers are not supported")


def scheme_of(
    groups: Sequence[ConfigGroup], ignore: Sequence[str], module_name: str, class_name: str = "Linear"
) -> WeightScheme | None:
    """The scheme of a module by its name in the checkpoint; None if it is left in 16 bit."""
    if matches(ignore, module_name, class_name):
        return None
    by_target = {target: group.scheme for group in reversed(groups) for target in group.targets}
    target = best_match(by_target, module_name, class_name)
    return None if target is None else by_target[target]


def read_kv_scheme(kv: dict[str, Any]) -> KVCacheScheme:
    if kv.get("num_bits") != 8:
        raise FormatError(f"quantization_config.kv_cache_scheme: {kv.get('num_bits')} bits are not supported (8 are)")
    return KVCacheScheme(
        kind=kv.get("type", "float"),
        bits=8,
        strategy=kv.get("strategy") or "tensor",
        dynamic=bool(kv.get("dynamic")),
        symmetric=kv.get("symmetric", True),
    )


def disk_layout(scheme: WeightScheme) -> str:
    """compressed-tensors' name of the layout of a scheme. Raises FormatError where it has none."""
    if scheme.has_offset:
        raise FormatError(f"compressed-tensors has no layout for {scheme.name} with a float offset")
    if scheme.kind == "float" and scheme.bits == 4:
        return next(layout for layout, (size, _) in _FP4.items() if size == scheme.group_size)
    return scheme.layout


def group_config(group: ConfigGroup) -> dict[str, Any]:
    scheme, activation = group.scheme, group.scheme.activation
    layout = disk_layout(scheme)
    strategy = "tensor_group" if layout == "nvfp4-pack-quantized" else scheme.strategy
    weights = _quantization_args(scheme.kind, scheme.bits, strategy, scheme.symmetric, dynamic=False)
    if scheme.strategy == "block":
        weights["block_structure"] = [scheme.block_rows, scheme.group_size]
    else:
        weights["group_size"] = scheme.group_size
    if layout in _FP4:
        weights["scale_dtype"] = f"torch.{_FP4[layout][1]}"
    if scheme.has_column_groups:
        weights["actorder"] = "group"
    return {
        "targets": list(group.targets),
        "weights": weights,
        "input_activations": None if activation is None else _activation_config(activation),
        "output_activations": None,
        "format": layout,
    }


def _activation_config(activation: ActivationScheme) -> dict[str, Any]:
    strategy, dynamic = "token" if activation.dynamic else "tensor", activation.dynamic
    if activation.group_size is not None:
        strategy = "group"
    if (activation.bits, activation.group_size) == (4, 16):  # NVFP4's
        strategy, dynamic = "tensor_group", "local"
    inputs = _quantization_args(activation.kind, activation.bits, strategy, True, dynamic=dynamic)
    if activation.bits == 4:
        inputs["scale_dtype"] = "torch." + dict(_FP4.values())[activation.group_size]
    return {**inputs, "group_size": activation.group_size}


def kv_config(kv: KVCacheScheme) -> dict[str, Any]:
    return _quantization_args(kv.kind, kv.bits, kv.strategy, kv.symmetric, dynamic=kv.dynamic)


def _quantization_args(kind: str, bits: int, strategy: str, symmetric: bool, *, dynamic: bool | str) -> dict[str, Any]:
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


def matches(patterns: Iterable[str], module_name: str, class_name: str = "Linear") -> bool:
    """Whether any pattern (an exact name, `re:` and a regular expression, or a class) names the module."""
    return any(_matches(pattern, module_name, class_name) for pattern in patterns)


def best_match(targets: Iterable[str], module_name: str, class_name: str) -> str | None:
    """The target that names the module: as in compressed-tensors, an exact name before a pattern before a class."""
    for target in sorted(targets, key=lambda t: (_specificity(t, module_name), t)):
        if _matches(target, module_name, class_name):
            return target
    return None


def _matches(pattern: str, module_name: str, class_name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module_name) is not None
    return pattern in (module_name, class_name)


def _specificity(target: str, module_name: str) -> int:
    if target == module_name:
        return 0
    return 1 if target.startswith("re:") else 2
