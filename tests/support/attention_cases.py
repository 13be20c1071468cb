"""Random ragged batches over a scattered store, for every attention backend's comparison with the definition."""

import torch
from hypothesis import strategies as st

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.kv_store import KVStore, Slots

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5
)  # (new tokens, tokens before)


def build(sequences, heads, kv_heads, head_dim, window, block_tokens, seed):
    """A store filled with random K and V of every sequence in shuffled blocks; the metadata; random queries."""
    generator = torch.Generator().manual_seed(seed)
    spec = KVCacheSpec(kv_heads, head_dim, head_dim, KV_DTYPES["fp32"], window)
    layout = KVCacheLayout((KVCacheGroup(spec, (0, 1), block_tokens),))
    lengths = [new + before for new, before in sequences]
    num_blocks = sum(-(-length // block_tokens) for length in lengths) + 3
    store = KVStore(layout, num_blocks, torch.device("cpu"))
    order = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.zeros(len(sequences), max(-(-length // block_tokens) for length in lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        for column in range(-(-length // block_tokens)):
            table[row, column] = order.pop()
        positions = torch.arange(length)
        slots = table[row, positions // block_tokens] * block_tokens + positions % block_tokens
        keys, values = torch.randn(2, length, kv_heads, head_dim, generator=generator)
        store.write(1, keys, values, Slots.of(slots, block_tokens))
    starts = [0]
    for new, _ in sequences:
        starts.append(starts[-1] + new)
    metadata = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table,
        slots=Slots.of(torch.zeros(0, dtype=torch.int64), block_tokens),
        block_tokens=block_tokens,
        window=window,
    )
    return torch.randn(starts[-1], heads, head_dim, generator=generator), store, metadata
