"""The torch attention against the definition, over random ragged batches in a scattered store."""

from unittest.mock import patch

import pytest
import torch
from attention_cases import SEQUENCES, build
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.attention import sdpa
from llmq.runtime.attention.reference import ReferenceAttention
from llmq.runtime.attention.sdpa import SdpaAttention
from llmq.runtime.kv_store import KVStore, Slots


@settings(max_examples=60, deadline=None)
@given(
    sequences=SEQUENCES,
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (3, 1)]),
    window=st.sampled_from([None, 1, 7, 16]),
    block_tokens=st.sampled_from([1, 4, 16]),
    softcap=st.sampled_from([None, 0.5, 5.0]),
    tiles=st.sampled_from([(1, 1), (100, 3), (sdpa.SCORES_PER_TILE, sdpa.QUERIES_PER_TILE)]),
    shared=st.sampled_from([0, 3, sdpa.MAX_SHARED_QUERIES]),
    seed=st.integers(0, 1000),
)
def test_sdpa_equals_the_definition(sequences, heads, window, block_tokens, softcap, tiles, shared, seed):
    queries, store, metadata = build(sequences, *heads, 8, window, block_tokens, seed)
    with patch.multiple(sdpa, SCORES_PER_TILE=tiles[0], QUERIES_PER_TILE=tiles[1], MAX_SHARED_QUERIES=shared):
        made = [
            backend(queries, 1, store, backend.prepare(metadata), 0.3, softcap)
            for backend in (ReferenceAttention(), SdpaAttention())
        ]
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-5)


def test_the_definition_equals_dense_attention():
    queries, store, metadata = build([(12, 0)], 4, 2, 8, None, 4, 0)
    keys, values = (
        part.flatten(0, 1)[:12].transpose(0, 1).repeat_interleave(2, dim=0)
        for part in store.read(1, metadata.block_table[0], torch.float32)
    )
    dense = torch.nn.functional.scaled_dot_product_attention(queries.transpose(0, 1), keys, values, is_causal=True)
    made = ReferenceAttention()(queries, 1, store, metadata, 8**-0.5)
    torch.testing.assert_close(made, dense.transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_layers_of_a_block_do_not_overlap(dtype):
    """What is written for one layer of one block is there, and nowhere else."""
    specs = (KVCacheSpec(2, 8, 4, KV_DTYPES[dtype]), KVCacheSpec(1, 8, 4, KV_DTYPES[dtype], window=8))
    layout = KVCacheLayout((KVCacheGroup(specs[0], (0, 2), 2), KVCacheGroup(specs[1], (1, 3), 4)))
    store = KVStore(layout, 3, torch.device("cpu"))
    assert store.num_bytes == 3 * layout.block_bytes
    for layer, (slot, size) in enumerate([(3, 2), (11, 4), (2, 2), (8, 4)]):
        heads = layout.groups[layer % 2].spec.num_kv_heads
        keys, values = torch.full((1, heads, 8), 10.0 + layer), torch.full((1, heads, 4), 20.0 + layer)
        store.write(layer, keys, values, Slots.of(torch.tensor([slot]), size))
    for layer, (slot, size) in enumerate([(3, 2), (11, 4), (2, 2), (8, 4)]):
        keys, values = store.read(layer, torch.tensor([slot // size]), torch.float32)
        assert (keys[0, slot % size] == 10 + layer).all()
        assert (values[0, slot % size] == 20 + layer).all()
    written = sum(spec.num_kv_heads * 12 * 2 for spec in specs)
    itemsize = KV_DTYPES[dtype].bits // 8
    assert int((store._blocks.view(-1, itemsize).any(dim=1)).sum()) == written
