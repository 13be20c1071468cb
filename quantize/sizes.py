"""Bytes of a quantized checkpoint, before it is made."""

from collections.abc import Mapping

from llmq.profiles.checkpoint import Checkpoint
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.targets import HEAD, Target

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def predict_bytes(
    source: Checkpoint, schemes: Mapping[str, WeightScheme], targets: tuple[Target, ...], dtype: str, has_kv: bool
) -> int:
    """Bytes of the tensors of OUT, in the compressed-tensors layout. `dtype`: of what is not quantized, and of scales.

    has_kv: whether each layer has a scale for K and one for V.
    """
    element_bytes = DTYPE_BYTES[dtype]
    total = sum(linear_bytes(target, schemes[target.name], element_bytes) for target in targets)
    quantized = {f"{target.name}.weight" for target in targets}
    for name, info in source.tensors.items():
        if name not in quantized and not (name == f"{HEAD}.weight" and is_duplicate_head(source)):
            total += info.num_elements * element_bytes
    return total + (2 * element_bytes * source.architecture.num_layers if has_kv else 0)


def linear_bytes(target: Target, scheme: WeightScheme, element_bytes: int) -> int:
    """Of one linear's weight, packed words, scales and zero points included."""
    groups = scheme.num_groups(target.in_features)
    if scheme.layout == "pack-quantized":
        per_word = 32 // scheme.bits
        total = target.out_features * -(-target.in_features // per_word) * 4 + 16  # and weight_shape
    else:
        total = target.out_features * target.in_features
    total += (1 if scheme.strategy == "tensor" else target.out_features * groups) * element_bytes
    if not scheme.symmetric:
        total += -(-target.out_features // (32 // scheme.bits)) * 4 * groups
    if scheme.activation is not None and not scheme.activation.dynamic:
        total += element_bytes
    return total


def is_duplicate_head(source: Checkpoint) -> bool:
    """Whether the checkpoint stores a head although its config ties it to the embedding."""
    return source.architecture.tie_word_embeddings and f"{HEAD}.weight" in source.tensors
