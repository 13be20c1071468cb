"""What distinguishes one decoder family from another, as data. The decoder itself is written once."""

from dataclasses import dataclass
from typing import Any

from llmq.profiles.errors import InputError


@dataclass(frozen=True)
class DecoderFamily:
    """Pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and a gated MLP.

    `qkv_bias` and `o_bias` name the config key that switches a bias on, or say that it is always or never there.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False  # RMSNorm over each head's q and k, before the rotation

    def has(self, which: str, config: dict[str, Any]) -> bool:
        rule = getattr(self, which)
        return bool(config.get(rule, False)) if isinstance(rule, str) else rule


FAMILIES = {
    "llama": DecoderFamily(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": DecoderFamily(),
    "qwen2": DecoderFamily(qkv_bias=True),
    "qwen3": DecoderFamily(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
}

ACTIVATIONS = ("silu",)


def family_of(config: dict[str, Any]) -> DecoderFamily:
    """The family of a config.json; InputError for one that the runtime does not run, by name."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise InputError(f"the runtime does not run model_type {model_type!r} yet (it runs {', '.join(FAMILIES)})")
    if config.get("hidden_act", "silu") not in ACTIVATIONS:
        raise InputError(f"hidden_act {config['hidden_act']!r} is not supported ({', '.join(ACTIVATIONS)} is)")
    return FAMILIES[model_type]
