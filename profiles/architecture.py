"""What a decoder is, in numbers, from its config.json alone. No torch, no weights."""

from dataclasses import dataclass
from typing import Any

from llmq.profiles.errors import InputError

Config = dict[str, Any]


@dataclass(frozen=True)
class DecoderShape:
    """What a config.json does not say of its model_type, because the model's code does.

    A bias is there always (True), never (False), or where the config key of that name is true.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False  # one vector of head_dim for q and one for k
    norms_per_layer: int = 2
    tied_by_default: bool = False


# An architecture that is not listed is refused, never guessed.
DECODER_SHAPES = {
    "llama": DecoderShape(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": DecoderShape(),
    "qwen2": DecoderShape(qkv_bias=True),
    "qwen3": DecoderShape(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "gemma3_text": DecoderShape(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, norms_per_layer=4, tied_by_default=True
    ),
}


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
    def shape(self) -> DecoderShape:
        return DECODER_SHAPES[self.model_type]

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
        """Read a config.json (nested `text_config` too). Raises InputError for an architecture that is not known."""
        config = {**config, **config.get("text_config", {})}
        model_type = config.get("model_type")
        if model_type not in DECODER_SHAPES:
            raise InputError(
                f"config.json: model_type {model_type!r} is not one that llmq knows ({', '.join(DECODER_SHAPES)})"
            )
        missing = [
            key
            for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            if not isinstance(config.get(key), int)
        ]
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
            tie_word_embeddings=bool(config.get("tie_word_embeddings", DECODER_SHAPES[model_type].tied_by_default)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            attention=tuple(
                AttentionLayer(num_kv_heads, head_dim, head_dim, window) for window in _windows(config, num_layers)
            ),
        )


def _windows(config: Config, num_layers: int) -> list[int | None]:
    """The sliding window of each layer, or None for full attention."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return [None] * num_layers
    if "layer_types" in config:
        return [window if kind == "sliding_attention" else None for kind in config["layer_types"]]
    if config["model_type"] in ("qwen2", "qwen3"):
        if not config.get("use_sliding_window"):
            return [None] * num_layers
        # Qwen2's own rule: the layers from max_window_layers on use the window.
        first = config.get("max_window_layers", num_layers)
        return [window if layer >= first else None for layer in range(num_layers)]
    if config["model_type"] == "gemma3_text":
        # Every sixth layer sees everything; configs older than `layer_types` name the period or rely on it.
        period = config.get("sliding_window_pattern", 6)
        return [None if (layer + 1) % period == 0 else window for layer in range(num_layers)]
    return [window] * num_layers
