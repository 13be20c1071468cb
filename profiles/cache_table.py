"""What each known model_type keeps of a sequence, as rows. The memory planner sizes all of them; the runtime runs those
without `not_run`. A model_type without a row is refused by the planner, by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.profiles.cache_layers import AttentionLayer, StateLayer
from llmq.profiles.cache_shapes import (
    CacheShape,
    CrossHeads,
    DeltaState,
    Heads,
    Latent,
    Mamba1State,
    Mamba2State,
    OwnHeads,
)
from llmq.profiles.errors import InputError
from llmq.profiles.families import FAMILIES
from llmq.profiles.layer_patterns import (
    ONE,
    Chosen,
    Config,
    Every,
    Field,
    LayerPattern,
    Listed,
    Numbered,
    Uniform,
    field,
)

Layers = tuple[AttentionLayer | None, ...]


@dataclass(frozen=True)
class CacheRow:
    """How config.json says what the layers of a model_type keep.

    patterns: tried in order, the first that config.json uses gives each layer its kind; none at all: K and V of one
    shape, with the windows of `families.windows_of`. shapes: what a layer of each kind keeps. names: where config.json
    has a number under a name of its own. defaults: what the model's own code takes where config.json is silent.
    shared_last: so many last layers use the cache of earlier ones. share: each that many layers use one cache.
    not_run: why the runtime does not run it; "" where it may.
    """

    patterns: tuple[LayerPattern, ...] = ()
    shapes: Mapping[str, tuple[CacheShape, ...]] | None = None
    names: Mapping[str, Field] | None = None
    defaults: Mapping[str, Any] | None = None
    shared_last: Field | None = None
    share: Chosen | None = None
    not_run: str = ""

    def named(self, config: Config) -> Config:
        """`config` with the numbers under their usual names, and the defaults where it is silent."""
        found = {name: value for name, at in (self.names or {}).items() if (value := at.of(config)) is not None}
        defaults = {name: value for name, value in (self.defaults or {}).items() if config.get(name) is None}
        return {**config, **defaults, **found}

    def kinds(self, config: Config) -> list[str]:
        num_layers = config.get("num_hidden_layers")
        for pattern in self.patterns:
            if (kinds := pattern.kinds(config, num_layers)) is not None:
                return kinds
        raise InputError("config.json: neither num_hidden_layers nor the kind of each layer")

    def layers(self, config: Config) -> tuple[Layers, tuple[StateLayer, ...]]:
        """K and V of each layer (None: it keeps none of its own), and all states of constant size."""
        attention: list[AttentionLayer | None] = []
        states: list[StateLayer] = []
        kinds = self.kinds(config)
        own = len(kinds) - ((self.shared_last.of(config) or 0) if self.shared_last else 0)
        share = (self.share.of(config) or 1) if self.share else 1
        for index, kind in enumerate(kinds):
            kept = [shape.layer(config, index) for shape in self.shapes[kind]]
            states += [layer for layer in kept if isinstance(layer, StateLayer)]
            keys = [layer for layer in kept if isinstance(layer, AttentionLayer)]
            attention.append(keys[0] if keys and index < own and index % share == 0 else None)
        return tuple(attention), tuple(states)


_LAYER_TYPES = Listed(
    field("layer_types"),
    {
        "full_attention": "full",
        "sliding_attention": "window",
        "chunked_attention": "chunk",
        "linear_attention": "linear",
        "attention": "full",
        "mamba": "state",
    },
)
_WINDOW = Heads(window=field("sliding_window"))
_FULL_AND_WINDOW: dict[str, tuple[CacheShape, ...]] = {"full": (Heads(),), "window": (_WINDOW,)}
_GPT_NAMES = {
    "hidden_size": field("n_embd", "hidden_size"),
    "num_hidden_layers": field("n_layer", "num_hidden_layers"),
    "num_attention_heads": field("n_head", "num_attention_heads"),
    "max_position_embeddings": field("n_positions", "seq_length"),
}
_ALL_FULL = (Uniform("full"),)
_OWN_RULE = "its own rule for the number of KV heads"
_OWN_NAMES = "numbers under names of its own"
_STATE = "layers that keep a state in place of K and V"


def _windows(period: int, key: str = "sliding_window_pattern", **more: Any) -> CacheRow:
    """Layers with a window but each `period`-th, unless config.json says which by `layer_types`."""
    every = Every(field(key, default=period), "full", "window")
    return CacheRow((_LAYER_TYPES, every), _FULL_AND_WINDOW, **more)


def _latent(indexed: bool = False) -> CacheRow:
    why = "sparse attention" if indexed else "latent attention"
    return CacheRow(_ALL_FULL, {"full": (Latent(indexed),)}, not_run=why)


def _fixed_heads(kv_heads: Field | Chosen, why: str, **more: Any) -> CacheRow:
    return CacheRow(_ALL_FULL, {"full": (Heads(kv_heads=kv_heads),)}, not_run=why, **more)


def _delta() -> CacheRow:
    every = Every(field("full_attention_interval", default=4), "full", "linear")
    return CacheRow((_LAYER_TYPES, every), {"full": (Heads(),), "linear": (DeltaState(),)}, not_run=_STATE)


_NEMOTRON_H_STATE = Mamba2State(
    field("mamba_num_heads"), field("mamba_head_dim"), field("ssm_state_size"), field("n_groups"), field("conv_kernel")
)
_MAMBA_2 = Mamba2State(
    field("mamba_n_heads", "n_mamba_heads"),
    field("mamba_d_head", "mamba_headdim"),
    field("mamba_d_state"),
    field("mamba_n_groups", "mamba_ngroups", default=1),
    field("mamba_d_conv", default=4),
)
_KDA_HEADS, _KDA_DIM = field("linear_attn_config.num_heads"), field("linear_attn_config.head_dim")
_KDA = DeltaState(
    *(_KDA_HEADS, _KDA_HEADS, _KDA_DIM, _KDA_DIM, field("linear_attn_config.short_conv_kernel_size")),
    kind="Kimi delta attention",
)
_GEMMA_4_GLOBAL = Heads(
    kv_heads=field("num_global_key_value_heads", "num_key_value_heads"), head_dim=field("global_head_dim", default=512)
)

_DECODER_HEADS = field("decoder_attention_heads")
_FALCON_KV_HEADS = Chosen(
    ((field("new_decoder_architecture"), field("num_kv_heads")), (field("multi_query", default=True), ONE)),
    field("n_head", "num_attention_heads"),
)

# K and V of grouped heads, one shape in all layers; windows as config.json has them.
_PLAIN = (
    *FAMILIES,
    *("apertus", "arcee", "baichuan", "bitnet", "cohere", "deepseek", "dots1", "ernie4_5", "ernie4_5_moe", "gemma"),
    *("glm", "glm4", "glm4_moe", "gpt_neox", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "internlm", "internlm2", "internlm3", "mimo", "minicpm", "minimax_m2", "ministral"),
    *("ministral3", "nemotron", "olmo", "olmoe", "opt", "orion", "persimmon", "phi", "phimoe", "qwen", "qwen2_moe"),
    *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "seed_oss"),
    *("stablelm", "step3p7", "xverse"),
)

_GEMMA_3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}

_TIED = {"tie_word_embeddings": True}

CACHE_ROWS: dict[str, CacheRow] = {
    **dict.fromkeys(_PLAIN, CacheRow()),
    **dict.fromkeys(("gemma", "cohere"), CacheRow(defaults=_TIED)),
    "gemma3_text": CacheRow(defaults=_GEMMA_3_DEFAULTS),
    "olmo3": _windows(4),
    "gpt_oss": _windows(2, defaults={"torch_dtype": "bfloat16"}),
    "cohere2": _windows(4, defaults=_TIED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "minicpm3"), _latent()),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _latent(indexed=True)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta()),
    "kimi_linear": CacheRow(
        (Numbered(field("linear_attn_config.full_attn_layers"), "full", "linear", first=1),),
        {"full": (Latent(),), "linear": (_KDA,)},
        not_run=_STATE,
    ),
    "nemotron_h": CacheRow(
        (
            Listed(field("layers_block_type"), {"mamba": "state", "attention": "full", "moe": "none", "mlp": "none"}),
            Listed(field("hybrid_override_pattern"), {"M": "state", "*": "full", "-": "none", "E": "none"}),
        ),
        {
            "full": (Heads(head_dim=field("head_dim", "attention_head_dim")),),
            "state": (_NEMOTRON_H_STATE,),
            "none": (),
        },
        not_run=_STATE,
    ),
    "jamba": CacheRow(
        (Every(field("attn_layer_period", default=8), "full", "state", field("attn_layer_offset", default=4)),),
        {"full": (Heads(),), "state": (Mamba1State(),)},
        not_run=_STATE,
    ),
    **dict.fromkeys(
        ("bamba", "granitemoehybrid"),
        CacheRow(
            (
                _LAYER_TYPES,
                Listed(field("layers_block_type"), {"mamba": "state", "attention": "full"}),
                Numbered(field("attn_layer_indices"), "full", "state"),
            ),
            {"full": (Heads(),), "state": (_MAMBA_2,)},
            not_run=_STATE,
        ),
    ),
    "zamba2": CacheRow(
        (
            Listed(field("layers_block_type"), {"mamba": "state", "linear_attention": "state", "hybrid": "both"}),
            Numbered(field("hybrid_layer_ids"), "both", "state"),
        ),
        {"both": (Heads(head_dim=field("attention_head_dim")), _MAMBA_2), "state": (_MAMBA_2,)},
        not_run=_STATE,
    ),
    "llama4_text": CacheRow(
        (
            _LAYER_TYPES,
            Listed(field("no_rope_layers"), {1: "chunk", 0: "full"}),
            Every(field("no_rope_layer_interval", default=4), "full", "chunk"),
        ),
        {"full": (Heads(),), "chunk": (Heads(window=field("attention_chunk_size", default=8192), chunked=True),)},
        not_run="chunked attention",
    ),
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"),
        _windows(
            5,
            defaults={"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512},
            shared_last=field("num_kv_shared_layers", default=15),
            not_run="layers that share a KV-cache",
        ),
    ),
    "gemma4_text": CacheRow(
        (_LAYER_TYPES, Every(field("sliding_window_pattern", default=6), "full", "window")),
        {"full": (_GEMMA_4_GLOBAL,), "window": (_WINDOW,)},
        shared_last=field("num_kv_shared_layers"),
        not_run="layers that differ in their head_dim",
    ),
    "mimo_v2_flash": CacheRow(
        (Listed(field("hybrid_layer_pattern"), {0: "full", 1: "window"}),),
        {
            "full": (Heads(value_dim=field("v_head_dim")),),
            "window": (
                Heads(
                    field("swa_num_key_value_heads"),
                    field("swa_head_dim"),
                    field("swa_v_head_dim"),
                    field("sliding_window", "sliding_window_size"),
                ),
            ),
        },
        not_run="values of another size than keys",
    ),
    "minimax_m3": CacheRow(
        _ALL_FULL,
        {
            "full": (
                Heads(
                    index_dim=field("sparse_attention_config.sparse_index_dim"),
                    indexed=field("sparse_attention_config.sparse_attention_freq"),
                ),
            )
        },
        not_run="sparse attention",
    ),
    "hunyuan": CacheRow(
        _ALL_FULL,
        {"full": (Heads(),)},
        share=Chosen(((field("use_cla"), field("cla_share_factor")),), ONE),
        not_run="layers that share a KV-cache",
    ),
    "nemotron-nas": CacheRow(_ALL_FULL, {"full": (OwnHeads(),)}, not_run="layers that differ in their attention"),
    "falcon": _fixed_heads(_FALCON_KV_HEADS, _OWN_RULE, names=_GPT_NAMES),
    "gpt_bigcode": _fixed_heads(
        Chosen(((field("multi_query", default=True), ONE),), field("n_head")), _OWN_RULE, names=_GPT_NAMES
    ),
    **dict.fromkeys(("gpt2", "gptj"), _fixed_heads(field("n_head"), _OWN_NAMES, names=_GPT_NAMES)),
    "phi-msft": _fixed_heads(field("n_head_kv"), _OWN_NAMES, names=_GPT_NAMES),
    "bloom": _fixed_heads(
        field("n_head"), _OWN_NAMES, names={**_GPT_NAMES, "hidden_size": field("n_embed", "hidden_size")}
    ),
    "chatglm": _fixed_heads(
        field("multi_query_group_num"),
        _OWN_RULE,
        names={
            "num_hidden_layers": field("num_layers"),
            "vocab_size": field("padded_vocab_size"),
            "head_dim": field("kv_channels"),
            "max_position_embeddings": field("seq_length"),
        },
    ),
    **dict.fromkeys(
        ("mpt", "dbrx"),
        _fixed_heads(
            field("attn_config.kv_n_heads"),
            _OWN_NAMES,
            names={
                "hidden_size": field("d_model"),
                "num_hidden_layers": field("n_layers"),
                "num_attention_heads": field("n_heads"),
                "max_position_embeddings": field("max_seq_len"),
            },
        ),
    ),
    "whisper": CacheRow(
        _ALL_FULL,
        {"full": (Heads(kv_heads=_DECODER_HEADS), CrossHeads(field("max_source_positions", default=1500)))},
        names={
            "hidden_size": field("d_model"),
            "num_hidden_layers": field("decoder_layers"),
            "num_attention_heads": _DECODER_HEADS,
            "max_position_embeddings": field("max_target_positions"),
        },
        not_run="an encoder beside the decoder",
    ),
}
