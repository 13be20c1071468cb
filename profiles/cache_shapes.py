"""What a layer of one kind keeps, read from a config.json: heads of K and V, a latent, or the state of a recurrence."""

from dataclasses import dataclass
from typing import Any, Protocol

from llmq.profiles.cache_layers import AttentionLayer, StateLayer, StatePart
from llmq.profiles.layer_patterns import Chosen, Config, Field, field

_NUM_HEADS = field("num_attention_heads")
_NUM_KEY_VALUE_HEADS = field("num_key_value_heads")
_HEAD_DIM = field("head_dim")
_BLOCK_CONFIGS = field("block_configs")
_INDEXER_TYPES = field("indexer_types")
_LINEAR_NUM_KEY_HEADS = field("linear_num_key_heads")
_LINEAR_NUM_VALUE_HEADS = field("linear_num_value_heads")
_LINEAR_KEY_HEAD_DIM = field("linear_key_head_dim")
_LINEAR_VALUE_HEAD_DIM = field("linear_value_head_dim")
_LINEAR_CONV_KERNEL_DIM = field("linear_conv_kernel_dim")
_MAMBA_EXPAND = field("mamba_expand", default=2)
_MAMBA_D_STATE = field("mamba_d_state", default=16)
_MAMBA_D_CONV = field("mamba_d_conv", default=4)


class CacheShape(Protocol):
    def layer(self, config: Config, index: int) -> AttentionLayer | StateLayer | None:
        """What layer `index` keeps; None: nothing of its own."""
        ...


@dataclass(frozen=True)
class Heads:
    """K and V of grouped heads. Without `kv_heads` as many as query heads; without `head_dim` hidden_size / heads."""

    kv_heads: Field | Chosen = _NUM_KEY_VALUE_HEADS
    head_dim: Field = _HEAD_DIM
    value_dim: Field | None = None  # None: as wide as K
    window: Field | None = None
    chunked: bool = False
    index_dim: Field | None = None  # elements of 16 bit a token that an indexer keeps
    indexed: Field | None = None  # one 0 or 1 a layer: which have an indexer

    def layer(self, config: Config, index: int) -> AttentionLayer:
        heads = _NUM_HEADS.number(config)
        kv_heads = self.kv_heads.number(config) if self.kv_heads.of(config) else heads
        head_dim = self.head_dim.of(config) or config["hidden_size"] // heads
        value_dim = self.value_dim.of(config) if self.value_dim else None
        window = self.window.of(config) if self.window else None
        index_bytes = 0
        if self.index_dim is not None and self.indexed.of(config)[index]:
            index_bytes = 2 * self.index_dim.number(config)
        return AttentionLayer(kv_heads, head_dim, value_dim or head_dim, window or None, self.chunked, index_bytes)


@dataclass(frozen=True)
class OwnHeads:
    """K and V of layers that each have their own number of query heads to a KV head (NVIDIA's NAS models)."""

    blocks: Field = _BLOCK_CONFIGS

    def layer(self, config: Config, index: int) -> AttentionLayer | None:
        attention: dict[str, Any] = self.blocks.of(config)[index]["attention"]
        heads, group = _NUM_HEADS.number(config), attention.get("n_heads_in_group")
        if attention.get("no_op") or attention.get("replace_with_linear") or not group:
            return None
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return AttentionLayer(heads // group, head_dim, head_dim, attention.get("window_length"))


INDEX_SCALE_BYTES = 4  # one float32 a token beside the FP8 keys of DeepSeek's indexer


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a latent and one rope key a token, for all heads.

    `indexed`: DeepSeek sparse attention beside it, index_head_dim keys in FP8 and a scale a token, in the layers that
    do not take over another layer's choice ("shared" in `indexer_types`).
    """

    indexed: bool = False
    indexer_types: Field = _INDEXER_TYPES

    def layer(self, config: Config, index: int) -> AttentionLayer:
        width = field("kv_lora_rank").number(config) + field("qk_rope_head_dim").number(config)
        kinds = self.indexer_types.of(config)
        has_index = self.indexed and (kinds is None or kinds[index] != "shared")
        index_bytes = field("index_head_dim").number(config) + INDEX_SCALE_BYTES if has_index else 0
        return AttentionLayer(1, width, 0, index_bytes=index_bytes)


_CONV_BITS = 16  # what a causal convolution looks back on is kept as it was computed
_STATE_DTYPE = field("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default="float32")
_STATE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


def _state_bits(config: Config) -> int:
    return _STATE_BITS.get(str(_STATE_DTYPE.of(config)), 32)


@dataclass(frozen=True)
class DeltaState:
    """A gated delta net: a convolution over q, k and v, and a [key, value] matrix for each value head."""

    key_heads: Field = _LINEAR_NUM_KEY_HEADS
    value_heads: Field = _LINEAR_NUM_VALUE_HEADS
    key_dim: Field = _LINEAR_KEY_HEAD_DIM
    value_dim: Field = _LINEAR_VALUE_HEAD_DIM
    kernel: Field = _LINEAR_CONV_KERNEL_DIM
    kind: str = "gated delta net"

    def layer(self, config: Config, index: int) -> StateLayer:
        keys, values = self.key_heads.number(config), self.value_heads.number(config)
        key_dim, value_dim = self.key_dim.number(config), self.value_dim.number(config)
        past = self.kernel.number(config) - 1
        parts = (
            StatePart(2 * keys * key_dim * past, keys, _CONV_BITS),
            StatePart(values * value_dim * past, values, _CONV_BITS),
            StatePart(values * key_dim * value_dim, values, _state_bits(config)),
        )
        return StateLayer(self.kind, parts, values)


@dataclass(frozen=True)
class Mamba1State:
    """Mamba (arXiv 2312.00752): a convolution and a state of `state` numbers for each inner channel."""

    expand: Field = _MAMBA_EXPAND
    state: Field = _MAMBA_D_STATE
    kernel: Field = _MAMBA_D_CONV

    def layer(self, config: Config, index: int) -> StateLayer:
        channels = self.expand.number(config) * config["hidden_size"]
        parts = (
            StatePart(channels * (self.kernel.number(config) - 1), channels, _CONV_BITS),
            StatePart(channels * self.state.number(config), channels, _state_bits(config)),
        )
        return StateLayer("Mamba", parts, channels)


@dataclass(frozen=True)
class Mamba2State:
    """Mamba-2 (arXiv 2405.21060): a convolution over x, B and C, and a [head, state] matrix for each head."""

    heads: Field
    head_dim: Field
    state: Field
    groups: Field
    kernel: Field

    def layer(self, config: Config, index: int) -> StateLayer:
        heads, state, groups = (part.number(config) for part in (self.heads, self.state, self.groups))
        past, inner = self.kernel.number(config) - 1, heads * self.head_dim.number(config)
        parts = (
            StatePart(inner * past, heads, _CONV_BITS),
            StatePart(2 * groups * state * past, groups, _CONV_BITS),
            StatePart(inner * state, heads, _state_bits(config)),
        )
        return StateLayer("Mamba-2", parts, heads)


@dataclass(frozen=True)
class CrossHeads:
    """K and V of an encoder's `tokens` positions, computed once for a sequence."""

    tokens: Field

    def layer(self, config: Config, index: int) -> StateLayer:
        heads = _NUM_HEADS.number(config)
        return StateLayer(
            "cross attention", (StatePart(2 * config["hidden_size"] * self.tokens.number(config), heads, None),), heads
        )
