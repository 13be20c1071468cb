"""Which module feeds which linears, as data: where a scale on a linear's input channels can be undone without a cost.

Multiplying the input columns of `linears` by s and dividing the output channels of `source` by s changes nothing (AWQ,
arXiv 2306.00978 section 3.2; SmoothQuant, 2211.10438 eq. 3). `source` is a norm's weight, or a linear's rows.
"""

from dataclasses import dataclass
from typing import Any, Literal

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.families import DecoderFamily


@dataclass(frozen=True)
class ScaleMapping:
    """Names are relative to a decoder layer. `kind` says how an input channel of `linears` finds its source channel:

    "norm": the same index of the norm's weight (and bias, if it has one); "rows": the same row of the source linear;
    "heads": the row of the KV head that the query head of the channel reads (grouped-query attention: several query
    heads share its scale).
    offset: the norm multiplies by offset + weight (Gemma: 1), so that offset + weight is what a scale divides.
    obstacle: why this pair can never take a scale in this architecture; None where it can.
    """

    source: str
    linears: tuple[str, ...]
    kind: Literal["norm", "rows", "heads"]
    offset: float = 0.0
    obstacle: str | None = None


def mappings_of(checkpoint: Checkpoint, layer: int) -> tuple[ScaleMapping, ...]:
    """The mappings of decoder layer `layer`, in the order of the computation, with those that cannot be and why.

    None at all for a family that is not known.
    """
    family, config = checkpoint.architecture.family, checkpoint.config
    if family is None:
        return ()
    config = {**config, **config.get("text_config", {})}
    before_mlp = _mixture(family, config) if _has_experts(family, config, layer) else _dense(family)
    return (*_attention(family), *before_mlp)


def _attention(family: DecoderFamily) -> tuple[ScaleMapping, ...]:
    inputs = _norm_mapping(family, family.attention_norms.before, family.qkv)
    if len(family.qkv) < 3:
        obstacle = f"v is inside {family.qkv[0]}, stored in one with q and k"
        return inputs, ScaleMapping(family.qkv[0], (family.o,), "heads", obstacle=obstacle)
    return inputs, ScaleMapping(family.qkv[2], (family.o,), "heads")


def _dense(family: DecoderFamily) -> tuple[ScaleMapping, ...]:
    inputs = _norm_mapping(family, family.mlp_norms.before, family.mlp_in)
    return inputs, _product(family.mlp_in, family.mlp_out, family.gated)


def _mixture(family: DecoderFamily, config: dict[str, Any]) -> tuple[ScaleMapping, ...]:
    """The router reads the norm's output too and keeps its bytes, so that the norm can take no scale."""
    names = family.experts
    prefixes = [f"{names.experts}.{index}." for index in range(names.count.of(config))]
    readers = tuple(prefix + name for prefix in prefixes for name in (names.gate, names.up))
    obstacle = f"{names.router} reads it too and keeps its bytes"
    norm = ScaleMapping(family.mlp_norms.before or "(no norm)", readers, "norm", obstacle=obstacle)
    return norm, *(_product((prefix + names.gate, prefix + names.up), prefix + names.down, True) for prefix in prefixes)


def _norm_mapping(family: DecoderFamily, norm: str | None, linears: tuple[str, ...]) -> ScaleMapping:
    if norm is None:
        return ScaleMapping("(no norm)", linears, "norm", obstacle="no norm stands before them")
    return ScaleMapping(norm, linears, "norm", offset=1.0 if family.norm == "rms plus one" else 0.0)


def _product(mlp_in: tuple[str, ...], mlp_out: str, gated: bool) -> ScaleMapping:
    if not gated:
        return ScaleMapping(mlp_in[0], (mlp_out,), "rows", obstacle="an activation stands between them")
    if len(mlp_in) == 1:
        obstacle = f"up is inside {mlp_in[0]}, stored in one with gate"
        return ScaleMapping(mlp_in[0], (mlp_out,), "rows", obstacle=obstacle)
    return ScaleMapping(mlp_in[1], (mlp_out,), "rows")


def _has_experts(family: DecoderFamily, config: dict[str, Any], layer: int) -> bool:
    return family.experts is not None and family.experts.has_layer(layer, config)


def why_skipped(mapping: ScaleMapping, quantized: set[str]) -> str | None:
    """Why a mapping cannot be used in a layer of which only the linears in `quantized` are; None if it can.

    A linear left in 16 bit keeps its bytes: neither its columns nor its rows can take a scale.
    """
    if mapping.obstacle is not None:
        return mapping.obstacle
    kept = [name for name in mapping.linears if name not in quantized]
    if mapping.kind != "norm" and mapping.source not in quantized:
        kept.append(mapping.source)
    if not kept:
        return None
    return f"{', '.join(kept)} {'is' if len(kept) == 1 else 'are'} left in 16 bit"
