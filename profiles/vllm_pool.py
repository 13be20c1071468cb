"""vLLM's KV-cache pool: how many bytes one of its blocks takes, and how many blocks a request holds.

Layers with the same needs are split into groups of equally many layers, each with a block table of its own; a block
holds one page of every layer of one group, so that all blocks are equal. After `get_kv_cache_groups` and
`get_max_concurrency_for_kv_cache_config` in vLLM's v1/core/kv_cache_utils.py.
"""

import math
from collections import Counter
from dataclasses import dataclass

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.cache_layers import AttentionLayer
from llmq.profiles.vllm_version import VllmVersion

BLOCK_TOKENS = 16
_FEW_MORE = 1.5  # so many times the fewest layers of a kind: groups are padded up to the most


@dataclass(frozen=True)
class LayerNeed:
    """What a layer keeps on one rank: `bytes_per_token`, of all tokens or of a window or chunk, or a state."""

    bytes_per_token: int
    window: int | None = None
    chunked: bool = False
    state_bytes: int = 0


@dataclass(frozen=True)
class PoolGroup:
    """Layers under one block table. `count` tables of the same kind."""

    need: LayerNeed
    block_tokens: int
    count: int

    def blocks_for(self, num_tokens: int, step_tokens: int, state_blocks: int) -> int:
        """Blocks of one request of `num_tokens`, in all tables of this kind."""
        need = self.need
        if need.state_bytes:
            return self.count * state_blocks
        held = num_tokens
        if need.window is not None:
            held = min(num_tokens, need.window - (not need.chunked) + step_tokens)
        one_more = need.window is not None and not need.chunked  # a window starts anywhere in its first block
        return self.count * (-(-held // self.block_tokens) + one_more)


@dataclass(frozen=True)
class VllmPool:
    """Of one rank. `step_tokens`: all that may be scheduled and not settled."""

    version: VllmVersion
    groups: tuple[PoolGroup, ...]
    block_bytes: int
    step_tokens: int

    def num_blocks(self, num_bytes: float) -> int:
        return max(0, int(num_bytes // self.block_bytes))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` tokens holds at most."""
        states = self.version.state_blocks
        return sum(group.blocks_for(num_tokens, self.step_tokens, states) for group in self.groups)

    def concurrency(self, num_blocks: int, max_model_len: int) -> float:
        """Requests of max_model_len tokens at once, as logged."""
        return num_blocks / self.blocks_for(max_model_len)

    def logged_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """The size of the pool in tokens, as this version logs it."""
        if self.version.tokens_of_longest:
            return int(self.concurrency(num_blocks, max_model_len) * max_model_len)
        tables = sum(group.count for group in self.groups)
        return num_blocks // tables * min(group.block_tokens for group in self.groups)

    @classmethod
    def of(
        cls,
        architecture: ModelArchitecture,
        version: VllmVersion,
        *,
        kv_bits: int,
        ranks: int = 1,
        step_tokens: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> "VllmPool":
        """`kv_bits`: of one number of K or V, whose scales vLLM keeps for a whole layer."""
        attention = [_need(layer, kv_bits, ranks) for layer in architecture.keys]
        states = [LayerNeed(0, state_bytes=state.rank_bytes(ranks, kv_bits=16)) for state in architecture.states]
        windows = {need.window for need in attention} - {None}
        mixed = len({need.bytes_per_token for need in attention}) > 1
        grouped = version.has_window_groups and (version.mixes_pages or not mixed)
        if not states and (not windows or not grouped):
            per_token = sum(need.bytes_per_token for need in attention)
            group = PoolGroup(LayerNeed(per_token), block_tokens, 1)
            return cls(version, (group,), per_token * block_tokens, step_tokens)
        if not grouped:
            attention = [LayerNeed(need.bytes_per_token) for need in attention]
        most = max(need.bytes_per_token for need in attention)
        if states:  # attention's page grows until it holds a state
            largest = max(need.state_bytes for need in states)
            block_tokens *= -(-largest // (most * block_tokens))
        page_bytes = most * block_tokens
        kinds = Counter([*attention, *states])
        fewest, largest_kind = min(kinds.values()), max(kinds.values())
        layers = largest_kind if largest_kind < fewest * _FEW_MORE else fewest
        groups = tuple(
            PoolGroup(need, _tokens_in(page_bytes, need, block_tokens), math.ceil(number / layers))
            for need, number in kinds.items()
        )
        return cls(version, groups, page_bytes * layers, step_tokens)


def _need(layer: AttentionLayer, kv_bits: int, ranks: int) -> LayerNeed:
    heads = max(1, layer.num_kv_heads // ranks)
    num_bytes = heads * (layer.head_dim_k + layer.head_dim_v) * kv_bits // 8 + layer.index_bytes
    return LayerNeed(num_bytes, layer.window, layer.chunked)


def _tokens_in(page_bytes: int, need: LayerNeed, block_tokens: int) -> int:
    """Tokens in a page: as many more as a layer takes fewer bytes, where that is a whole number; else it is padded."""
    if need.state_bytes:
        return block_tokens
    page = need.bytes_per_token * block_tokens
    return block_tokens * (page_bytes // page) if page_bytes % page == 0 else block_tokens
