"""Bytes of a model's weights: from the headers of its files, or from config.json and how it would be stored."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.checkpoint import read_checkpoint, read_config, read_quantization
from llmq.profiles.errors import InputError
from llmq.profiles.families import DecoderFamily, value
from llmq.profiles.linear_shape import Experts, LinearShape, UnknownWeightsError
from llmq.profiles.safetensors_file import REMOTE_HEADERS
from llmq.profiles.units import parse_bytes
from llmq.profiles.weight_storage import WEIGHT_SHAPE_BYTES, WeightStorage, declared_storage
from llmq.profiles.weight_table import WEIGHT_ROWS

_AUTO_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class WeightSize:
    num_bytes: int
    how: str  # where the number is from, for the user
    parts: tuple[tuple[str, int], ...] = ()  # what it is the sum of: (what, bytes)

    def beside(self, name: str, other: "WeightSize") -> "WeightSize":
        """Both together; `name` is the other's."""
        own = self.parts or ((self.how, self.num_bytes),)
        how = f"{self.how}; {name} {other.how}"
        return WeightSize(self.num_bytes + other.num_bytes, how, (*own, (f"{name}, {other.how}", other.num_bytes)))


def weight_size(path: Path, wanted: str | None = None) -> WeightSize:
    """Weight bytes of the model at `path` (a folder, or a config.json alone).

    `wanted`: a size ("40GiB"), a scheme ("fp8", "w4g64"), or None for the model as it is. Raises
    UnknownWeightsError where only the weights themselves could tell.
    """
    config = read_config(path)
    if wanted is not None:
        try:
            storage = parse_storage(wanted, config)
        except ValueError:
            return WeightSize(_given_bytes(wanted), "as given")
        return _by_config(config, storage)
    if path.is_dir() and (any(path.glob("*.safetensors")) or (path / REMOTE_HEADERS).is_file()):
        tensors = read_checkpoint(path).tensors.values()
        dtypes = sorted({tensor.dtype for tensor in tensors})
        parts = [(f"tensors in {one}", sum(t.num_bytes for t in tensors if t.dtype == one)) for one in dtypes]
        return WeightSize(sum(num_bytes for _, num_bytes in parts), "as stored", tuple(parts))
    return _by_config(config, _declared_storage(path, config))


def _by_config(config: dict[str, Any], storage: WeightStorage) -> WeightSize:
    parts = storage_parts(config, storage)
    return WeightSize(sum(num_bytes for _, num_bytes in parts), f"{storage.name}, by config.json", parts)


def _given_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except InputError:
        raise InputError(
            f"--weights {text}: give a scheme (bf16, fp16, fp32, fp8, int8, w4, w4g64, w3g64, w4g128-asym) or a size "
            "(40GiB, 40GB)"
        ) from None


def parse_storage(text: str, config: dict[str, Any]) -> WeightStorage:
    """The scheme called bf16, fp16, fp32, fp8, int8, w4g64 (w2, w3, w4 or w8), or w4: the largest of groups 128, 64, 32
    that divides. With -asym a packed zero point beside each scale: of 4 bits in groups of 128 4.156 bits, else 4.125.

    Raises ValueError when `text` is no scheme, InputError when its group size does not divide this model.
    """
    text = text.lower()
    if text in ("bf16", "fp16"):
        return WeightStorage(text, 16)
    if text == "fp32":
        return WeightStorage(text, 32, other_bytes=4)
    if text in ("fp8", "int8"):
        return WeightStorage(text, 8)
    match = re.fullmatch(r"w([2348])(?:g(\d+))?(-asym)?", text)
    if not match:
        raise ValueError(text)
    widths = sorted({linear.in_features for linear in linear_shapes(config)})
    bits, sizes = int(match.group(1)), [int(match.group(2))] if match.group(2) else _AUTO_GROUPS
    dividing = [size for size in sizes if size and all(width % size == 0 for width in widths)]
    if not dividing:
        raise InputError(f"--weights {text}: no group of {sizes} divides all input widths {widths}")
    asym = match.group(3) or ""
    zero_bits = bits if asym else 0
    name = f"w{bits}g{dividing[0]}{asym}"
    return WeightStorage(name, bits, dividing[0], zero_bits=zero_bits, linear_bytes=WEIGHT_SHAPE_BYTES)


def linear_shapes(config: dict[str, Any]) -> list[LinearShape]:
    """The linears of the decoder layers, by kind. Raises InputError for an architecture that is not known."""
    arch, merged = ModelArchitecture.from_config(config), _text_config(config)
    if row := WEIGHT_ROWS.get(arch.model_type):
        return row.linears(arch, merged)
    family = _family(config)
    hidden, layers = arch.hidden_size, arch.num_layers
    q_rows, kv_rows = arch.num_attention_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    qkv_bias, mlp_bias = value(family.qkv_bias, merged), value(family.mlp_bias, merged)
    qkv_rows = (q_rows, kv_rows, kv_rows) if len(family.qkv) == 3 else (q_rows + 2 * kv_rows,)
    shapes = [
        *(LinearShape(_last(n), rows, hidden, layers, qkv_bias) for n, rows in zip(family.qkv, qkv_rows, strict=True)),
        LinearShape(_last(family.o), hidden, q_rows, layers, value(family.o_bias, merged)),
    ]
    sparse = sum(family.experts.has_layer(layer, merged) for layer in range(layers)) if family.experts else 0
    if dense := layers - sparse:
        ffn = arch.intermediate_size
        rows = (2 if family.gated else 1) * ffn // len(family.mlp_in)
        shapes += [LinearShape(_last(name), rows, hidden, dense, mlp_bias) for name in family.mlp_in]
        shapes.append(LinearShape(_last(family.mlp_out), hidden, ffn, dense, mlp_bias))
    if sparse:
        experts, ffn = family.experts, family.experts.intermediate_size.of(merged)
        count = sparse * experts.count.of(merged)
        shapes += [LinearShape(name, ffn, hidden, count, is_expert=True) for name in (experts.gate, experts.up)]
        shapes.append(LinearShape(experts.down, hidden, ffn, count, is_expert=True))
    return shapes


def experts_of(config: dict[str, Any]) -> Experts | None:
    """None: a decoder without routed experts. Raises InputError for an architecture that is not known."""
    merged = _text_config(config)
    if row := WEIGHT_ROWS.get(str(merged.get("model_type"))):
        return row.experts_of(merged)
    experts = _family(config).experts
    return Experts(experts.count.of(merged), experts.per_token.of(merged)) if experts else None


def other_parameters(config: dict[str, Any]) -> int:
    """Embedding, head (unless tied), norms, routers and biases: what every scheme leaves in 16 bit."""
    arch, merged = ModelArchitecture.from_config(config), _text_config(config)
    if row := WEIGHT_ROWS.get(arch.model_type):
        return row.others(arch, merged)
    family = _family(config)
    embeddings = arch.vocab_size * arch.hidden_size * (1 if arch.tie_word_embeddings else 2)
    names = (family.attention_norms, family.mlp_norms)
    norms_per_layer = sum(name is not None for norms in names for name in (norms.before, norms.after))
    norms = (arch.num_layers * norms_per_layer + 1) * arch.hidden_size * (2 if family.norm == "layer" else 1)
    heads = {None: 0, "head": 2, "projection": arch.num_attention_heads + arch.num_kv_heads}[family.qk_norm]
    qk_norms = heads * arch.head_dim * arch.num_layers
    routers = 0
    if family.experts:
        sparse = sum(family.experts.has_layer(layer, merged) for layer in range(arch.num_layers))
        routers = sparse * family.experts.count.of(merged) * arch.hidden_size
    biases = sum(linear.out_features * linear.count for linear in linear_shapes(config) if linear.bias)
    return embeddings + norms + qk_norms + routers + biases


def _family(config: dict[str, Any]) -> DecoderFamily:
    family = ModelArchitecture.from_config(config).family
    if family is None:
        raise UnknownWeightsError(
            f"what weights model_type {_text_config(config).get('model_type')!r} has is not known from its config.json "
            "alone; say how many bytes they take: --weights 40GiB"
        )
    return family


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **config.get("text_config", {})}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def parameter_count(config: dict[str, Any]) -> int:
    """Parameters, a tied head counted once."""
    linears = sum(linear.out_features * linear.in_features * linear.count for linear in linear_shapes(config))
    return linears + other_parameters(config)


def storage_bytes(config: dict[str, Any], storage: WeightStorage) -> int:
    """Bytes of all tensors in the compressed-tensors layout, as llmq and llm-compressor write it."""
    return sum(num_bytes for _, num_bytes in storage_parts(config, storage))


def storage_parts(config: dict[str, Any], storage: WeightStorage) -> tuple[tuple[str, int], ...]:
    """(what, bytes) of each kind of linear and of what stays unquantized."""
    if "text_config" in config:
        raise UnknownWeightsError(
            "this config.json describes more than a text decoder, whose weights it does not give; "
            "say how many bytes they take: --weights 40GiB"
        )
    parts = [
        (
            f"{linear.name}: {linear.count:,} of [{linear.out_features:,}, {linear.in_features:,}]",
            linear.count * _linear_bytes(linear, storage),
        )
        for linear in linear_shapes(config)
    ]
    others = other_parameters(config)
    what = f"embedding, head, norms, biases: {others:,} of {8 * storage.other_bytes} bit"
    return (*parts, (what, others * storage.other_bytes))


def _linear_bytes(linear: LinearShape, storage: WeightStorage) -> int:
    rows, width = linear.out_features, linear.in_features
    if linear.name.startswith(storage.kept):
        return rows * width * storage.other_bytes
    if storage.bits >= 16:
        return rows * width * storage.bits // 8
    # Fewer than 8 bits lie in int32 words, a row at a time.
    values = rows * width if storage.bits == 8 else rows * -(-width * storage.bits // 32) * 4
    groups = -(-width // (storage.group_size or width))
    scales = groups * -(-rows // storage.block_rows) * storage.scale_bytes
    zeros = groups * -(-rows * storage.zero_bits // 32) * 4
    return values + scales + zeros + width * storage.column_bytes + storage.linear_bytes


def _declared_storage(path: Path, config: dict[str, Any]) -> WeightStorage:
    """What the quantization config of a folder without weights says they are stored as."""
    quantization = read_quantization(path, config)
    dtype = ModelArchitecture.from_config(config).dtype
    if quantization is None:
        return parse_storage({"float32": "fp32", "float16": "fp16"}.get(dtype, "bf16"), config)
    storage = declared_storage(quantization)
    if storage is None:
        raise UnknownWeightsError(
            f"how many bytes weights quantized by {quantization.get('quant_method')!r} take is not known from their "
            "config alone; say it: --weights 40GiB, or a scheme (bf16, fp8, int8, w4, w4g64)"
        )
    return replace(storage, other_bytes=4 if dtype == "float32" else 2)
