"""The tensors that a decoder of a known family is made of, by its config alone: what its checkpoint is held against."""

from collections.abc import Iterator
from typing import Any

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.families import DecoderFamily, value

Shape = tuple[int | None, ...]  # None: config.json does not say

# Stored by some writers, and nothing of it is lost by not reading it: buffers, which are computed.
UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)
_HEAD = "lm_head.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")


def decoder_tensors(architecture: ModelArchitecture, family: DecoderFamily, config: dict[str, Any]) -> dict[str, Shape]:
    """Name -> shape of every tensor of a checkpoint in 16 bit. config: that of the text, where there are several."""
    hidden = architecture.hidden_size
    found: dict[str, Shape] = {"model.embed_tokens.weight": (architecture.vocab_size, hidden)}
    found |= _norm(family, "model.norm", hidden)
    if not architecture.tie_word_embeddings:
        found[_HEAD] = (architecture.vocab_size, hidden)
    for layer in range(architecture.num_layers):
        for name, shape in _layer(architecture, family, config, layer):
            found[f"model.layers.{layer}.{name}"] = shape
    return found


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise InputError unless a checkpoint in 16 bit holds what its config.json calls for, nothing else, and in floats.

    Of a family that is not known only the number of layers is compared.
    """
    family = checkpoint.architecture.family
    if family is None:
        _check_layers(checkpoint)
        return
    config = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
    expected = decoder_tensors(checkpoint.architecture, family, config)
    path, stored = checkpoint.path, checkpoint.tensors
    if missing := [name for name in expected if name not in stored]:
        raise InputError(f"{path} has no tensor {_few(missing)}, which its config.json calls for")
    if left := [name for name in stored if name not in expected and name != _HEAD and not _is_unused(name)]:
        raise InputError(
            f"{path} holds {_few(left)}, which model_type {checkpoint.architecture.model_type!r} does not use, so that "
            "it would be run as another model"
        )
    for name, shape in expected.items():
        info = stored[name]
        if len(info.shape) != len(shape) or any(b not in (None, a) for a, b in zip(info.shape, shape, strict=True)):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise InputError(f"{path}: {name} is {list(info.shape)}, config.json makes it [{wanted}]")
        if info.dtype not in _FLOATS:
            raise InputError(f"{path}: {name} is stored as {info.dtype}, {', '.join(_FLOATS)} are expected")


def _check_layers(checkpoint: Checkpoint) -> None:
    stored = {int(name.split(".")[2]) for name in checkpoint.tensors if name.startswith("model.layers.")}
    wanted = set(range(checkpoint.architecture.num_layers))
    if stored and stored != wanted:
        odd = sorted(stored ^ wanted)[0]
        words = "holds no tensor of" if odd in wanted else "holds tensors of"
        raise InputError(f"{checkpoint.path} {words} layer {odd}, and config.json says {len(wanted)} layers")


def _layer(
    architecture: ModelArchitecture, family: DecoderFamily, config: dict[str, Any], layer: int
) -> Iterator[tuple[str, Shape]]:
    hidden, heads = architecture.hidden_size, architecture.num_attention_heads
    shape = architecture.attention[layer]
    widths = (heads * shape.head_dim_k, shape.num_kv_heads * shape.head_dim_k, shape.num_kv_heads * shape.head_dim_v)
    if len(family.qkv) == 1:
        widths = (sum(widths),)
    for name, width in zip(family.qkv, widths, strict=True):
        yield from _linear(name, width, hidden, value(family.qkv_bias, config))
    yield from _linear(family.o, hidden, heads * shape.head_dim_v, value(family.o_bias, config))
    if family.qk_norm is not None:
        per_head = (shape.head_dim_k,) * 2
        for name, width in zip("qk", per_head if family.qk_norm == "head" else widths[:2], strict=True):
            yield f"self_attn.{name}_norm.weight", (width,)
    for names in (family.attention_norms, family.mlp_norms):
        for name in (names.before, names.after):
            if name is not None:
                yield from _norm(family, name, hidden).items()
    if family.experts is not None and family.experts.has_layer(layer, config):
        names, count = family.experts, family.experts.count.of(config)
        width = names.intermediate_size.of(config)
        yield from _linear(names.router, count, hidden, False)
        for number in range(count):
            yield from _linear(f"{names.experts}.{number}.{names.gate}", width, hidden, False)
            yield from _linear(f"{names.experts}.{number}.{names.up}", width, hidden, False)
            yield from _linear(f"{names.experts}.{number}.{names.down}", hidden, width, False)
        return
    width, has_bias = architecture.intermediate_size, value(family.mlp_bias, config)
    is_fused = family.gated and len(family.mlp_in) == 1
    for name in family.mlp_in:
        yield from _linear(name, width and width * (2 if is_fused else 1), hidden, has_bias)
    yield from _linear(family.mlp_out, hidden, width, has_bias)


def _linear(name: str, out: int | None, width: int | None, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out, width)
    if has_bias:
        yield f"{name}.bias", (out,)


def _norm(family: DecoderFamily, name: str, width: int) -> dict[str, Shape]:
    found: dict[str, Shape] = {f"{name}.weight": (width,)}
    return {**found, f"{name}.bias": (width,)} if family.norm == "layer" else found


def _is_unused(name: str) -> bool:
    return name.endswith(UNUSED_SUFFIXES)


def _few(names: list[str]) -> str:
    return names[0] + (f" ({len(names)} such tensors)" if len(names) > 1 else "")
