"""Bytes of a quantized checkpoint, before it is made."""

from collections.abc import Mapping

from llmq.profiles.checkpoint import Checkpoint
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.recipe import DEFAULT_FORMAT
from llmq.quantize.targets import HEAD, Target

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def predict_bytes(
    source: Checkpoint,
    schemes: Mapping[str, WeightScheme],
    targets: tuple[Target, ...],
    dtype: str,
    *,
    has_kv: bool = False,
    layout: str = DEFAULT_FORMAT,
) -> int:
    """Bytes of the tensors of OUT. `dtype`: of what is not quantized, and of scales.

    has_kv: whether each layer has a scale for K and one for V. layout: as in `--format`.
    """
    element_bytes = DTYPE_BYTES[dtype]
    total = sum(linear_bytes(target, schemes[target.name], element_bytes, layout) for target in targets)
    quantized = {f"{target.name}.weight" for target in targets}
    for name, info in source.tensors.items():
        if name not in quantized and not (name == f"{HEAD}.weight" and is_duplicate_head(source)):
            total += info.num_elements * element_bytes
    return total + (2 * element_bytes * source.architecture.num_layers if has_kv else 0)


def linear_bytes(target: Target, scheme: WeightScheme, element_bytes: int, layout: str = DEFAULT_FORMAT) -> int:
    """Of one linear's weight, packed words, scales and zero points included."""
    out, width = target.out_features, target.in_features
    rows, groups = scheme.scale_shape((out, width))
    zeros = -(-out * scheme.bits // 32) * 4 * groups
    if layout in ("gptq", "gptq_v2"):  # zero points and a group index always
        return width * scheme.bits // 32 * 4 * out + rows * groups * element_bytes + zeros + width * 4
    if layout == "awq":  # float16 scales
        return width * out // 2 + rows * groups * 2 + zeros
    if layout == "fp8":
        return out * width + rows * groups * 4
    if scheme.layout == "pack-quantized":
        total = out * -(-width * scheme.bits // 32) * 4 + 16  # and weight_shape
    else:
        total = out * width
    total += rows * groups * element_bytes + (0 if scheme.symmetric else zeros)
    if scheme.activation is not None and not scheme.activation.dynamic:
        total += element_bytes
    return total


def is_duplicate_head(source: Checkpoint) -> bool:
    """Whether the checkpoint stores a head although its config ties it to the embedding."""
    return source.architecture.tie_word_embeddings and f"{HEAD}.weight" in source.tensors
