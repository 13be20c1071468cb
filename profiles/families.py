"""What distinguishes one decoder family from another, as data: what a config.json does not say because the model's code
does. The memory planner and the runtime's one decoder both read it. An unlisted family is nobody's guess: see
`architecture.py` for what may be derived of it.
"""

from dataclasses import dataclass
from typing import Any, Literal

from llmq.profiles.errors import InputError

Config = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """A value that config.json may give under one of `names`; `default` is what the model's own code takes otherwise.

    A null in config.json is a value: it switches a softcap off.
    """

    names: str | tuple[str, ...]
    default: Any = None

    def of(self, config: Config) -> Any:
        names = (self.names,) if isinstance(self.names, str) else self.names
        return next((config[name] for name in names if name in config), self.default)


def value(setting: Any, config: Config) -> Any:
    """A setting of a family for one config: a Key is looked up, anything else is the same in all of the family."""
    return setting.of(config) if isinstance(setting, Key) else setting


@dataclass(frozen=True)
class NormNames:
    """The norms around attention or MLP, relative to the layer: x + after(part(before(x))). None: there is none."""

    before: str | None
    after: str | None = None


@dataclass(frozen=True)
class ExpertNames:
    """A mixture of experts in place of the MLP: router and experts relative to the layer, the linears to an expert."""

    router: str
    experts: str
    gate: str
    up: str
    down: str
    count: Key
    per_token: Key
    intermediate_size: Key
    renormalize: bool | Key  # whether the weights of the chosen experts are made to sum to 1
    every: int | Key = 1  # layers n - 1, 2n - 1, … have experts,
    dense_layers: tuple[int, ...] | Key = ()  # but these do not

    def has_layer(self, layer: int, config: Config) -> bool:
        dense = value(self.dense_layers, config) or ()
        return layer not in dense and (layer + 1) % value(self.every, config) == 0


@dataclass(frozen=True)
class DecoderFamily:
    """A decoder with rotary positions and grouped-query attention; everything else is said here.

    Linears are named relative to the layer. Several names in `qkv` or `mlp_in` are siblings that read the same input;
    one name in `qkv` is a checkpoint that stores them fused, in the same order.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    gated: bool = True  # the first half of what `mlp_in` gives, activated, times the second half
    experts: ExpertNames | None = None
    qkv_bias: bool | Key = False
    o_bias: bool | Key = False
    mlp_bias: bool | Key = False
    activation: Key = Key("hidden_act", "silu")

    norm: Literal["rms", "rms plus one", "layer"] = "rms"  # "rms plus one": scaled by 1 + weight (Gemma)
    norm_eps: Key = Key("rms_norm_eps", 1e-6)
    attention_norms: NormNames = NormNames("input_layernorm")
    mlp_norms: NormNames = NormNames("post_attention_layernorm")
    # RMSNorm over each head's q and k, or over the whole projections, before the rotation.
    qk_norm: Literal["head", "projection"] | None = None

    rope_theta: float = 10000.0  # where config.json gives none
    local_rope_theta: Key | None = None  # a base of their own for the layers with a window
    no_rope_every: Key | None = None  # without `no_rope_layers`: each n-th layer does not rotate

    window_switch: Key | None = None  # without it a window that config.json gives is used
    window_from_layer: Key | None = None  # the layers from this one on have the window
    full_attention_every: int | Key | None = None  # each n-th layer has none

    embedding_scale: Literal["sqrt hidden"] | Key | None = None
    attention_scale: Key | None = None  # times q·k; without it head_dim ** -0.5
    query_scalar: Key | None = None  # the same as its power -0.5
    residual_scale: Key | None = None  # of what attention and MLP add
    logits_divisor: Key | None = None
    attention_softcap: Key | None = None
    logits_softcap: Key | None = None
    tied_by_default: bool = False


_QWEN_WINDOW = {"window_switch": Key("use_sliding_window", False)}
_ATTENTION_BIAS = {"qkv_bias": Key("attention_bias", False), "o_bias": Key("attention_bias", False)}
_GEMMA: dict[str, Any] = {
    **_ATTENTION_BIAS,
    "activation": Key("hidden_activation", "gelu_pytorch_tanh"),
    "norm": "rms plus one",
    "attention_norms": NormNames("input_layernorm", "post_attention_layernorm"),
    "mlp_norms": NormNames("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "embedding_scale": "sqrt hidden",
    "query_scalar": Key("query_pre_attn_scalar", 256),
    "tied_by_default": True,
}

FAMILIES = {
    "llama": DecoderFamily(**_ATTENTION_BIAS, mlp_bias=Key("mlp_bias", False)),
    "mistral": DecoderFamily(),
    "qwen2": DecoderFamily(qkv_bias=True, **_QWEN_WINDOW, window_from_layer=Key("max_window_layers")),
    "qwen3": DecoderFamily(
        **_ATTENTION_BIAS, qk_norm="head", **_QWEN_WINDOW, window_from_layer=Key("max_window_layers")
    ),
    "gemma2": DecoderFamily(
        **_GEMMA,
        full_attention_every=2,
        attention_softcap=Key("attn_logit_softcapping", 50.0),
        logits_softcap=Key("final_logit_softcapping", 30.0),
    ),
    "gemma3_text": DecoderFamily(
        **_GEMMA,
        qk_norm="head",
        rope_theta=1_000_000.0,
        local_rope_theta=Key("rope_local_base_freq", 10000.0),
        full_attention_every=Key(("sliding_window_pattern", "_sliding_window_pattern"), 6),
        attention_softcap=Key("attn_logit_softcapping"),
        logits_softcap=Key("final_logit_softcapping"),
    ),
    "phi3": DecoderFamily(
        qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",), norm_eps=Key("rms_norm_eps", 1e-5)
    ),
    "olmo2": DecoderFamily(
        **_ATTENTION_BIAS,
        norm_eps=Key("rms_norm_eps", 1e-5),
        attention_norms=NormNames(None, "post_attention_layernorm"),
        mlp_norms=NormNames(None, "post_feedforward_layernorm"),
        qk_norm="projection",
    ),
    "smollm3": DecoderFamily(
        **_ATTENTION_BIAS,
        mlp_bias=Key("mlp_bias", False),
        rope_theta=2_000_000.0,
        no_rope_every=Key("no_rope_layer_interval", 4),
        **_QWEN_WINDOW,
        tied_by_default=True,
    ),
    "granite": DecoderFamily(
        **_ATTENTION_BIAS,
        mlp_bias=Key("mlp_bias", False),
        embedding_scale=Key("embedding_multiplier", 1.0),
        attention_scale=Key("attention_multiplier", 1.0),
        residual_scale=Key("residual_multiplier", 1.0),
        logits_divisor=Key("logits_scaling", 1.0),
    ),
    "starcoder2": DecoderFamily(
        mlp_in=("mlp.c_fc",),
        mlp_out="mlp.c_proj",
        gated=False,
        qkv_bias=Key("use_bias", True),
        o_bias=Key("use_bias", True),
        mlp_bias=Key("use_bias", True),
        activation=Key("hidden_act", "gelu_pytorch_tanh"),
        norm="layer",
        norm_eps=Key("norm_epsilon", 1e-5),
        tied_by_default=True,
    ),
    "mixtral": DecoderFamily(
        norm_eps=Key("rms_norm_eps", 1e-5),
        rope_theta=1_000_000.0,
        experts=ExpertNames(
            *("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
            count=Key(("num_local_experts", "num_experts"), 8),
            per_token=Key("num_experts_per_tok", 2),
            intermediate_size=Key("intermediate_size"),
            renormalize=True,
        ),
    ),
    "qwen3_moe": DecoderFamily(
        **_ATTENTION_BIAS,
        qk_norm="head",
        **_QWEN_WINDOW,
        experts=ExpertNames(
            *("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
            count=Key(("num_experts", "num_local_experts"), 128),
            per_token=Key("num_experts_per_tok", 8),
            intermediate_size=Key("moe_intermediate_size", 768),
            renormalize=Key("norm_topk_prob", False),
            every=Key("decoder_sparse_step", 1),
            dense_layers=Key("mlp_only_layers", ()),
        ),
    ),
}


def family_of(config: Config) -> DecoderFamily | None:
    """The family of a config.json (its text part merged in); None for a model_type that this table does not hold."""
    return FAMILIES.get(config.get("model_type"))


def windows_of(config: Config, num_layers: int) -> list[int | None]:
    """The sliding window of each layer, or None for full attention."""
    family = FAMILIES.get(config.get("model_type"), DecoderFamily())
    window = config.get("sliding_window")
    switched_off = config.get("use_sliding_window") is False
    if not window or switched_off:
        return [None] * num_layers
    if config.get("layer_types"):
        return [window if kind == "sliding_attention" else None for kind in config["layer_types"]]
    if family.window_switch is not None and not family.window_switch.of(config):
        return [None] * num_layers
    if family.no_rope_every is not None:
        raise InputError("config.json: use_sliding_window without layer_types does not say which layers have a window")
    first = value(family.window_from_layer, config)
    if family.window_from_layer is not None:
        first = num_layers if first is None else first
        return [window if layer >= first else None for layer in range(num_layers)]
    period = value(family.full_attention_every, config)
    return [None if period and (layer + 1) % period == 0 else window for layer in range(num_layers)]
