"""Bytes of a quantized checkpoint, and of the memory that making it takes, before it is made."""

from collections.abc import Mapping

from llmq.profiles.checkpoint import Checkpoint
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.recipe import DEFAULT_FORMAT, LinearSettings
from llmq.quantize.targets import DECODER_PREFIX, HEAD, Target

DEFAULT_MEMORY_BYTES = 512 * 2**20  # of activations, before they go into a file
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


def batch_tokens(widest: int) -> int:
    """Tokens that go through a layer at once: enough for the products to run at full speed, few enough that what lies
    between them stays small; of a wide layer so many that its widest activation has 4 million numbers."""
    return min(1024, 2**22 // widest)


def peak_memory(
    source: Checkpoint,
    targets: tuple[Target, ...],
    settings: Mapping[str, LinearSettings],
    num_tokens: int,
    longest: int,
) -> int:
    """About how many bytes a run of our own methods takes at most, above what imports take: for the largest layer its
    weights in float32, the second moments of its inputs, the activations that are held, and what one linear is worked
    on in. num_tokens: of calibration; 0 where none pass. longest: of its samples, which goes through a layer in one.
    """
    layers: dict[int, int] = {}
    for name, info in source.tensors.items():
        if name.startswith(DECODER_PREFIX):
            index = int(name.removeprefix(DECODER_PREFIX).partition(".")[0])
            layers[index] = layers.get(index, 0) + 4 * info.num_elements
    largest = max(4 * target.out_features * target.in_features for target in targets)
    total = max(layers.values()) + _COPIES * largest
    if not num_tokens:
        return total
    hidden, widest = source.architecture.hidden_size, max(target.in_features for target in targets)
    total += 4 * min(num_tokens, max(longest, batch_tokens(widest))) * (_BETWEEN[0] * hidden + _BETWEEN[1] * widest)
    moments: dict[int, dict[str, int]] = {}
    for target in targets:
        if settings[target.name].method in _WITH_MOMENTS:
            moments.setdefault(target.layer, {})[_input_of(source, target)] = 4 * target.in_features**2
    held = min(4 * num_tokens * hidden, DEFAULT_MEMORY_BYTES)
    return total + held + max((sum(inputs.values()) for inputs in moments.values()), default=0)


# Of the linear that is worked on: itself as it was, its numbers, its grid, and what is left of an error.
_COPIES = 5
_BETWEEN = (6, 3)  # activations as wide as the model, and as its MLP, while a batch passes a layer
_WITH_MOMENTS = ("awq", "gptq", "best", "smoothquant")


def _input_of(source: Checkpoint, target: Target) -> str:
    """A name of what a linear reads, the same for linears that read the same."""
    family = source.architecture.family
    parent, _, kind = target.name.rpartition(".")
    siblings = {name.rpartition(".")[2] for name in (*family.qkv, *family.mlp_in)} if family else set()
    if family and family.experts:
        siblings |= {family.experts.gate, family.experts.up}
    return parent if kind in siblings else target.name
