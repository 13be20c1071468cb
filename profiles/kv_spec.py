"""KV-cache arithmetic as properties of frozen specs: `kv-budget` prints it, the runtime allocates by it."""

import math
from dataclasses import dataclass, replace

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.cache_layers import AttentionLayer
from llmq.profiles.errors import InputError


@dataclass(frozen=True)
class KVDtype:
    """How one K or V element is stored.

    `scale_bytes` is what a dynamic scale costs, one per token, per KV head, for K and for V each; 0 where the format
    has no scale (16 and 32 bit) or where a static one, of the checkpoint, is used: FP8's habit, INT8's where it asks.
    """

    name: str
    bits: int
    scale_bytes: int = 0


DYNAMIC_SCALE_BYTES = 2

KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KVDtype("fp32", 32),
        KVDtype("bf16", 16),
        KVDtype("fp16", 16),
        KVDtype("fp8", 8),
        KVDtype("int8", 8, scale_bytes=DYNAMIC_SCALE_BYTES),
        KVDtype("int4", 4, scale_bytes=DYNAMIC_SCALE_BYTES),
    )
}

BLOCK_TOKENS = 16  # tokens in a block: at most 15 slots of waste a request


@dataclass(frozen=True)
class KVCacheSpec:
    """The K and V of one attention layer on one rank."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: KVDtype
    window: int | None = None  # tokens a query sees, itself included; None: all
    chunked: bool = False  # `window` is a chunk: a query sees from the last multiple of it on

    @property
    def payload_bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v) * self.dtype.bits // 8

    @property
    def scale_bytes_per_token(self) -> int:
        parts = bool(self.head_dim_k) + bool(self.head_dim_v)  # a latent is one, K and V are two
        return parts * self.num_kv_heads * self.dtype.scale_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.payload_bytes_per_token + self.scale_bytes_per_token


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table: the same spec, `block_tokens` tokens of each of them in one block."""

    spec: KVCacheSpec
    layers: tuple[int, ...]
    block_tokens: int
    index_bytes_per_token: int = 0  # of all layers, beside K and V: what sparse-attention indexers keep

    @property
    def payload_bytes_per_token(self) -> int:
        return len(self.layers) * self.spec.payload_bytes_per_token

    @property
    def scale_bytes_per_token(self) -> int:
        return len(self.layers) * self.spec.scale_bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        return self.payload_bytes_per_token + self.scale_bytes_per_token + self.index_bytes_per_token

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token

    def blocks_for(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Most blocks that a sequence of `num_tokens` holds at once when a step computes up to `step_tokens` of it."""
        blocks = -(-num_tokens // self.block_tokens)
        if self.spec.window is None:
            return blocks
        if self.spec.chunked:
            # From the start of its chunk to the end of the step; that start lies inside a block where sizes are odd.
            held = self.spec.window - 1 + step_tokens
            return min(blocks, -(-held // self.block_tokens) + (self.spec.window % self.block_tokens != 0))
        # A step reads window - 1 tokens before its own; such a span, starting anywhere, touches one block more than
        # its length fills.
        span = self.spec.window - 1 + step_tokens
        return min(blocks, -(-(span - 1) // self.block_tokens) + 1)


@dataclass(frozen=True)
class KVCacheLayout:
    """All groups of a model on one rank. Blocks of every group are equal in bytes, so that one pool serves them all; of
    some of the layers (`of_layers`) a block of the smaller groups has bytes to spare."""

    groups: tuple[KVCacheGroup, ...]
    state_bytes: int = 0  # a sequence, whatever its length, and apart from the blocks: of layers that keep a state
    is_part: bool = False

    def __post_init__(self) -> None:
        sizes = {group.block_bytes for group in self.groups}
        if len(sizes) != 1 and not self.is_part:
            raise ValueError(f"blocks of all groups must be equal in bytes, got {sorted(sizes)}")

    @property
    def block_bytes(self) -> int:
        return max(group.block_bytes for group in self.groups)

    def of_layers(self, start: int, stop: int) -> "KVCacheLayout":
        """The part that layers [start, stop) keep, numbered from 0: the same groups and tokens a block, so that block
        tables of the whole hold for it."""
        groups = (
            replace(group, layers=tuple(layer - start for layer in group.layers if start <= layer < stop))
            for group in self.groups
        )
        return KVCacheLayout(tuple(groups), self.state_bytes, is_part=True)

    @property
    def group_of_layer(self) -> list[int]:
        """Of each layer, the index of its group."""
        groups = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return [groups[layer] for layer in range(len(groups))]

    @property
    def held_groups(self) -> tuple[KVCacheGroup, ...]:
        """Those that have layers here."""
        return tuple(group for group in self.groups if group.layers)

    @property
    def payload_bytes_per_token(self) -> int:
        return sum(group.payload_bytes_per_token for group in self.groups)

    @property
    def scale_bytes_per_token(self) -> int:
        return sum(group.scale_bytes_per_token for group in self.groups)

    @property
    def index_bytes_per_token(self) -> int:
        return sum(group.index_bytes_per_token for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token adds while it is inside every window."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_late_token(self) -> int:
        """Bytes that one more token adds when it is beyond every window."""
        return sum(group.bytes_per_token for group in self.groups if group.spec.window is None)

    def needed_bytes(self, num_tokens: int) -> int:
        """What the mathematics needs for a sequence's tokens: a window layer holds at most its window, no block is
        rounded. Its `state_bytes` come on top."""
        return sum(
            group.bytes_per_token * (min(num_tokens, group.spec.window) if group.spec.window else num_tokens)
            for group in self.groups
        )

    def blocks_for(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Blocks that the allocator reserves for a sequence of `num_tokens`, computed up to `step_tokens` at a time."""
        return sum(group.blocks_for(num_tokens, step_tokens) for group in self.groups)

    def reserved_bytes(self, num_tokens: int, step_tokens: int = 1) -> int:
        return self.blocks_for(num_tokens, step_tokens) * self.block_bytes

    def num_blocks(self, capacity_bytes: int) -> int:
        return capacity_bytes // self.block_bytes

    def longest_sequence(self, num_blocks: int, limit: int, step_tokens: int = 1) -> int:
        """Most tokens, up to `limit`, that one sequence can hold in `num_blocks` blocks."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle, step_tokens) <= num_blocks else (low, middle - 1)
        return low

    @classmethod
    def of(
        cls,
        architecture: ModelArchitecture,
        kv_dtype: str,
        *,
        block_tokens: int = BLOCK_TOKENS,
        tensor_parallel: int = 1,
        dynamic_scales: bool | None = None,
    ) -> "KVCacheLayout":
        """Group the layers of `architecture` by spec and give each group as many tokens a block as makes blocks equal.

        The smallest group holds `block_tokens` tokens or the fewest more that make all sizes whole. A rank holds
        num_kv_heads / tensor_parallel heads, at least one (replicated). `dynamic_scales`: whether each token brings
        scales of its own; None: as the format does it. Raises InputError for a number of ranks that cannot be.
        """
        dtype = KV_DTYPES[kv_dtype]
        if dynamic_scales is not None and dtype.bits < 16:
            dtype = replace(dtype, scale_bytes=DYNAMIC_SCALE_BYTES if dynamic_scales else 0)
        if tensor_parallel not in (valid := architecture.valid_tensor_parallel):
            raise InputError(
                f"--tp {tensor_parallel} does not split {architecture.num_attention_heads} heads and "
                f"{architecture.num_kv_heads} KV heads evenly; valid: {', '.join(map(str, valid))}"
            )
        layers_by_spec: dict[KVCacheSpec, list[int]] = {}
        for index, layer in enumerate(architecture.attention):
            if layer is not None:
                layers_by_spec.setdefault(_rank_spec(layer, dtype, tensor_parallel), []).append(index)
        groups = [
            KVCacheGroup(spec, tuple(layers), 1, sum(architecture.attention[index].index_bytes for index in layers))
            for spec, layers in layers_by_spec.items()
        ]
        per_token = [group.bytes_per_token for group in groups]
        common = math.lcm(*per_token)
        # The group with the most bytes a token gets the fewest tokens in a block: at least `block_tokens`.
        fewest = common // max(per_token)
        block_bytes = common * -(-block_tokens // fewest)
        return cls(
            tuple(replace(group, block_tokens=block_bytes // group.bytes_per_token) for group in groups),
            sum(state.rank_bytes(tensor_parallel, dtype.bits) for state in architecture.states),
        )


def _rank_spec(layer: AttentionLayer, dtype: KVDtype, tensor_parallel: int) -> KVCacheSpec:
    # More ranks than KV heads: each head is held by several.
    heads = max(1, layer.num_kv_heads // tensor_parallel)
    return KVCacheSpec(heads, layer.head_dim_k, layer.head_dim_v, dtype, layer.window, layer.chunked)
