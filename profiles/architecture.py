"""What a decoder is, in numbers, from its config.json alone. No torch, no weights."""

from dataclasses import dataclass
from typing import Any

from llmq.profiles.cache_layers import AttentionLayer, StateLayer
from llmq.profiles.cache_table import CACHE_ROWS, Layers
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
class ModelArchitecture:
    model_type: str
    hidden_size: int
    intermediate_size: int | None  # of a dense layer; None: config.json names none
    num_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # the checkpoint's own: "bfloat16", "float16", "float32"
    attention: Layers  # one per layer; None: it keeps no K and V of its own
    states: tuple[StateLayer, ...] = ()  # of layers that keep something of constant size
    is_known: bool = True  # False: no row says so, K and V of grouped heads are assumed
    not_run: str = ""  # why the runtime does not run it; "" where it may

    @property
    def keys(self) -> tuple[AttentionLayer, ...]:
        """The K and V of the layers that keep their own."""
        return tuple(layer for layer in self.attention if layer is not None)

    @property
    def head_dim(self) -> int:
        return self.keys[0].head_dim_k

    @property
    def num_kv_heads(self) -> int:
        return self.keys[0].num_kv_heads

    @property
    def family(self) -> DecoderFamily | None:
        """None: the runtime has no data for it and runs it by transformers' own code."""
        return FAMILIES.get(self.model_type)

    @property
    def valid_tensor_parallel(self) -> list[int]:
        """Rank counts that divide the attention heads (and those of states), and either divide the KV heads or are a
        multiple of them."""
        heads, kv_heads = self.num_attention_heads, {layer.num_kv_heads for layer in self.keys}
        divided = {heads, *(state.num_heads for state in self.states)}
        return [
            ranks
            for ranks in range(1, heads + 1)
            if all(number % ranks == 0 for number in divided)
            and all(kv % ranks == 0 or ranks % kv == 0 for kv in kv_heads)
        ]

    def require_runnable(self) -> "ModelArchitecture":
        """This architecture. Raises InputError where `kv-budget` can size it, but the runtime does not run it."""
        if self.not_run:
            raise InputError(
                f"config.json: model_type {self.model_type!r} is not one that llmq runs ({', '.join(FAMILIES)} are), "
                f"and its KV-cache is not one that the runtime allocates: it has {self.not_run}"
            )
        return self

    @classmethod
    def from_config(cls, config: Config) -> "ModelArchitecture":
        """Read a config.json (nested `text_config` too).

        A model_type without a row in CACHE_ROWS is taken for grouped-query attention of one shape in all layers, and
        not `is_known`. Raises InputError where its config.json says otherwise, or lacks the numbers.
        """
        config = {**config, **(config.get("text_config") or {})}
        model_type, row = str(config.get("model_type")), CACHE_ROWS.get(config.get("model_type"))
        family, is_plain = family_of(config), row is None or not row.patterns
        if family is None and is_plain and (reason := _why_not_plain(config)):
            raise InputError(
                f"config.json: model_type {model_type!r} is not one that llmq knows ({', '.join(FAMILIES)}), and its "
                f"KV-cache cannot be derived: it has {reason}"
            )
        named, not_run = (row.named(config), row.not_run) if row else (config, "")
        required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if not is_plain and not isinstance(named.get("num_hidden_layers"), int):
            named["num_hidden_layers"] = len(row.kinds(named))
        if missing := [key for key in required if not isinstance(named.get(key), int)]:
            raise InputError(f"config.json: {', '.join(missing)} missing or not a whole number")
        if left_out := [key for key in required if key not in config and is_plain]:
            not_run = f"no {', '.join(left_out)} in config.json"
        attention, states = (_plain_layers(named), ()) if is_plain else row.layers(named)
        if not any(attention):
            raise InputError(
                f"config.json: model_type {model_type!r} keeps no K and V in any layer: no KV-cache to size"
            )
        tied = family.tied_by_default if family else False
        return cls(
            model_type=model_type,
            hidden_size=named["hidden_size"],
            intermediate_size=_whole(named.get("intermediate_size")),
            num_layers=named["num_hidden_layers"],
            num_attention_heads=named["num_attention_heads"],
            vocab_size=named["vocab_size"],
            max_position_embeddings=named.get("max_position_embeddings") or 2048,
            tie_word_embeddings=bool(named.get("tie_word_embeddings", tied)),
            dtype=str(named.get("dtype") or named.get("torch_dtype") or "float32"),
            attention=attention,
            states=states,
            is_known=row is not None,
            not_run=not_run,
        )


def names_dtype(config: Config) -> bool:
    """Whether a config.json says in which dtype its model is. One that does not is taken for float32."""
    nested = config.get("text_config") or {}
    return any(part.get(key) for part in (config, nested) for key in ("dtype", "torch_dtype"))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _plain_layers(config: Config) -> Layers:
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    # A declared head_dim wins over hidden_size / heads: they differ in Qwen3, Gemma, Mistral-Nemo.
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return tuple(AttentionLayer(kv_heads, head_dim, head_dim, window) for window in windows_of(config, num_layers))


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
