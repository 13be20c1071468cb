"""What a decoder is, in numbers, from its config.json alone. No torch, no weights."""

from dataclasses import dataclass
from typing import Any

from llmq.profiles.errors import InputError
from llmq.profiles.families import FAMILIES, DecoderFamily, family_of, windows_of

Config = dict[str, Any]

# Keys of config.json that say: the cache is not K and V of grouped heads for each layer, or there is more than one.
_NOT_PLAIN = {
    "kv_lora_rank": "latent attention",
    "is_encoder_decoder": "an encoder beside the decoder",
    "num_kv_shared_layers": "layers that share a KV-cache",
    "attention_chunk_size": "chunked attention",
    "block_configs": "layers that differ in their attention",
    "multi_query": "its own rule for the number of KV heads",
    "new_decoder_architecture": "its own rule for the number of KV heads",
    "index_topk": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "ssm_cfg": "state-space layers",
    "mamba_d_state": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "linear_num_key_heads": "linear attention",
    "attn_layer_period": "layers without attention",
    "global_head_dim": "layers that differ in their head_dim",
    "v_head_dim": "values of another size than keys",
    "attention_other_setting": "layers that differ in their attention",
}
_PLAIN_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class AttentionLayer:
    """The KV-cache of one layer: K is [num_kv_heads, head_dim_k] a token, V is [num_kv_heads, head_dim_v]."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None


@dataclass(frozen=True)
class ModelArchitecture:
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # the checkpoint's own: "bfloat16", "float16", "float32"
    attention: tuple[AttentionLayer, ...]  # one per layer

    @property
    def head_dim(self) -> int:
        return self.attention[0].head_dim_k

    @property
    def num_kv_heads(self) -> int:
        return self.attention[0].num_kv_heads

    @property
    def family(self) -> DecoderFamily | None:
        """None: the runtime has no data for it and runs it by transformers' own code."""
        return FAMILIES.get(self.model_type)

    @property
    def valid_tensor_parallel(self) -> list[int]:
        """Rank counts that divide the attention heads, and either divide the KV heads or are a multiple of them."""
        heads, kv_heads = self.num_attention_heads, {layer.num_kv_heads for layer in self.attention}
        return [
            ranks
            for ranks in range(1, heads + 1)
            if heads % ranks == 0 and all(kv % ranks == 0 or ranks % kv == 0 for kv in kv_heads)
        ]

    @classmethod
    def from_config(cls, config: Config) -> "ModelArchitecture":
        """Read a config.json (nested `text_config` too).

        A model_type outside FAMILIES is taken for grouped-query attention of one shape in all layers. Raises InputError
        where its config.json says otherwise, or lacks the numbers.
        """
        config = {**config, **config.get("text_config", {})}
        model_type = str(config.get("model_type"))
        missing = [
            key
            for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            if not isinstance(config.get(key), int)
        ]
        family = family_of(config)
        if family is None and (reason := _why_not_plain(config)):
            raise InputError(
                f"config.json: model_type {model_type!r} is not one that llmq knows ({', '.join(FAMILIES)}), and its "
                f"KV-cache cannot be derived: it has {reason}"
            )
        if missing:
            raise InputError(f"config.json: {', '.join(missing)} missing or not a whole number")
        num_heads = config["num_attention_heads"]
        num_layers = config["num_hidden_layers"]
        # A declared head_dim wins over hidden_size / heads: they differ in Qwen3, Gemma, Mistral-Nemo.
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        return cls(
            model_type=model_type,
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=num_layers,
            num_attention_heads=num_heads,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tied_by_default if family else False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            attention=tuple(
                AttentionLayer(num_kv_heads, head_dim, head_dim, window) for window in windows_of(config, num_layers)
            ),
        )


def _why_not_plain(config: Config) -> str | None:
    """What in the config of an unknown family speaks against one K and V of grouped heads a layer, or None."""
    if not config.get("model_type"):
        return "no model_type"
    reason = next((words for key, words in _NOT_PLAIN.items() if config.get(key)), None)
    if reason:
        return reason
    if config.get("sliding_window_pattern") and not config.get("layer_types"):
        return "a pattern of windows, but no layer_types"
    kinds = sorted({str(kind) for kind in config.get("layer_types") or ()} - set(_PLAIN_LAYERS))
    if kinds:
        return f"layers of type {', '.join(kinds)}"
    if not isinstance(config.get("num_key_value_heads", 1), int | None):
        return "KV heads that differ from layer to layer"
    return None
