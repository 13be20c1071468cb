"""What quantized linears take on disk, by the words of their checkpoint's quantization_config alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WEIGHT_SHAPE_BYTES = 2 * 8  # of compressed-tensors' `weight_shape`
_ALL_ROWS = 1 << 62


@dataclass(frozen=True)
class WeightStorage:
    """How the decoder layers' linears are stored. Embedding, norms, biases and head stay in `other_bytes` an element.

    group_size: input features that share a scale of `scale_bytes`; None: one scale a row (a channel). block_rows: rows
    that share it. zero_bits: of a zero point beside each scale, packed along the rows. column_bytes: of what is stored
    for each input feature. linear_bytes: of what is stored for each linear. kept: what the names of linears begin with,
    relative to their layer, that stay unquantized.
    """

    name: str
    bits: int
    group_size: int | None = None
    other_bytes: int = 2
    scale_bytes: int = 2
    block_rows: int = 1
    zero_bits: int = 0
    column_bytes: int = 0
    linear_bytes: int = 0
    kept: tuple[str, ...] = ()


def declared_storage(quantization: dict[str, Any]) -> WeightStorage | None:
    """What a quantization_config says of the storage of every linear; None where it does not say all of it."""
    read = _DECLARED.get(quantization.get("quant_method", ""))
    return None if read is None else read(quantization)


def _compressed_tensors_storage(config: dict[str, Any]) -> WeightStorage | None:
    groups = list((config.get("config_groups") or {}).values())
    weights = groups[0].get("weights") if len(groups) == 1 else None
    if not weights:
        return None
    layout = groups[0].get("format") or config.get("format")
    bits, group = weights.get("num_bits", 8), weights.get("group_size")
    name, group = f"compressed-tensors, {bits} bit", group if group and group > 0 else None
    inputs = groups[0].get("input_activations") or {}
    if layout == "nvfp4-pack-quantized":  # e4m3 scales, a global one for the weight and one for the input
        return WeightStorage(name, 4, group, scale_bytes=1, linear_bytes=4 + 4 * bool(inputs))
    if layout == "mxfp4-pack-quantized":  # e8m0 scales
        return WeightStorage(name, 4, group, scale_bytes=1)
    if weights.get("strategy") == "block":
        block_rows, columns = weights["block_structure"]
        return WeightStorage(name, 8, columns, block_rows=block_rows)
    is_packed = layout == "pack-quantized"
    zero_bits = 0 if weights.get("symmetric", True) else bits
    is_static = bool(inputs) and not inputs.get("dynamic")
    if weights.get("strategy") == "tensor":  # one scale, for all rows
        return WeightStorage(name, bits, block_rows=_ALL_ROWS, linear_bytes=2 * is_static)
    return WeightStorage(name, bits, group, zero_bits=zero_bits, linear_bytes=WEIGHT_SHAPE_BYTES * is_packed)


def _gptq_storage(config: dict[str, Any]) -> WeightStorage | None:
    bits, group = config.get("bits"), config.get("group_size")
    if not bits or config.get("dynamic"):
        return None
    return WeightStorage(
        f"gptq, {bits} bit", bits, group if group and group > 0 else None, zero_bits=bits, column_bytes=4
    )


def _awq_storage(config: dict[str, Any]) -> WeightStorage | None:
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if not bits or not group:
        return None
    return WeightStorage(f"awq, {bits} bit", bits, group if group > 0 else None, zero_bits=bits)


def _fp8_storage(config: dict[str, Any]) -> WeightStorage | None:
    if block := config.get("weight_block_size"):
        return WeightStorage("fp8 in blocks", 8, block[1], scale_bytes=4, block_rows=block[0])
    return WeightStorage("fp8", 8, scale_bytes=4, block_rows=_ALL_ROWS)


def _mxfp4_storage(config: dict[str, Any]) -> WeightStorage | None:
    """Open Compute's microscaling FP4: a scale in E8M0 for 32 numbers. What is kept is named by module."""
    kept = [name.partition("layers.*.")[2] for name in config.get("modules_to_not_convert") or ()]
    return WeightStorage("mxfp4", 4, 32, scale_bytes=1, kept=tuple(name for name in kept if name))


_DECLARED: dict[str, Callable[[dict[str, Any]], WeightStorage | None]] = {
    "compressed-tensors": _compressed_tensors_storage,
    "gptq": _gptq_storage,
    "awq": _awq_storage,
    "fp8": _fp8_storage,
    "mxfp4": _mxfp4_storage,
}
