"""Which module feeds which linears, as data: where a scale on a linear's input channels can be undone without a cost.

Multiplying the input columns of `linears` by s and dividing the output channels of `source` by s changes nothing (AWQ,
arXiv 2306.00978 section 3.2; SmoothQuant, 2211.10438 eq. 3). `source` is a norm's weight, or a linear's rows.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScaleMapping:
    """Names are relative to a decoder layer. `kind` says how an input channel of `linears` finds its source channel:

    "norm": the same index of the norm's weight; "rows": the same row of the source linear; "heads": the row of the KV
    head that the query head of the channel reads (grouped-query attention: several query heads share its scale).
    """

    source: str
    linears: tuple[str, ...]
    kind: Literal["norm", "rows", "heads"]


_LLAMA_LIKE = (
    ScaleMapping("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "norm"),
    ScaleMapping("self_attn.v_proj", ("self_attn.o_proj",), "heads"),
    ScaleMapping("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "norm"),
    ScaleMapping("mlp.up_proj", ("mlp.down_proj",), "rows"),
)

# model_type -> mappings of one decoder layer, in the order of the computation.
MAPPINGS: dict[str, tuple[ScaleMapping, ...]] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
}


def why_skipped(mapping: ScaleMapping, quantized: set[str]) -> str | None:
    """Why a mapping cannot be used in a layer of which only the linears in `quantized` are; None if it can.

    A linear left in 16 bit keeps its bytes: neither its columns nor its rows can take a scale.
    """
    kept = [name for name in mapping.linears if name not in quantized]
    if mapping.kind != "norm" and mapping.source not in quantized:
        kept.append(mapping.source)
    if not kept:
        return None
    return f"{', '.join(kept)} {'is' if len(kept) == 1 else 'are'} left in 16 bit"
