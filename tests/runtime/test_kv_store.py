"""KVStore's memory: zero, aligned, and not taken before it is written."""

from pathlib import Path

import pytest
import torch

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.kv_store import KVOrder, KVStore, Slots


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_a_large_pool_takes_no_memory_until_it_is_written():
    spec = KVCacheSpec(3, 64, 64, KV_DTYPES["bf16"], None)
    layout = KVCacheLayout((KVCacheGroup(spec, tuple(range(30)), 16),))
    num_blocks = 2**30 // layout.block_bytes
    before = resident_bytes()
    store = KVStore(layout, num_blocks, torch.device("cpu"))
    assert resident_bytes() - before < 2**26
    assert store.num_bytes == num_blocks * layout.block_bytes
    keys, values = store.parts(29)
    for part in (keys, values):
        assert part.payload.data_ptr() % 64 == 0
        part.payload[5] = 1
    assert int(store.parts(0)[0].payload[num_blocks - 1].count_nonzero()) == 0
    assert resident_bytes() - before < 2**27


def test_blocks_are_cleared_for_who_reads_unwritten_slots():
    spec = KVCacheSpec(1, 8, 8, KV_DTYPES["bf16"], None)
    store = KVStore(KVCacheLayout((KVCacheGroup(spec, (0,), 4),)), 3, torch.device("cpu"))
    keys, values = store.parts(0)
    keys.payload.fill_(1)
    values.payload.fill_(1)
    store.clear_blocks([1])
    assert int(keys.payload.count_nonzero()) == keys.payload.numel()
    store.clears_unwritten = True
    store.clear_blocks([1])
    for part in (keys, values):
        assert part.payload.flatten(1).count_nonzero(dim=1).tolist() == [32, 0, 32]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("block_tokens", "are_tiled"), [(16, True), (32, True), (8, False)])
@pytest.mark.parametrize("head_dim", [8, 24])
def test_numbers_in_tiles_are_the_same(kv_dtype, head_dim, block_tokens, are_tiled):
    """In the same bytes of a block, in another order."""
    spec = KVCacheSpec(3, head_dim, head_dim, KV_DTYPES[kv_dtype], None)
    layout = KVCacheLayout((KVCacheGroup(spec, (0, 1), block_tokens),))
    static = dict.fromkeys((0, 1), (0.5, 0.5)) if kv_dtype == "fp8" else None
    plain, tiled = (KVStore(layout, 4, torch.device("cpu"), static, in_tiles=in_tiles) for in_tiles in (False, True))
    slots = Slots.of(torch.randperm(4 * block_tokens)[: 3 * block_tokens], block_tokens)
    keys, values = torch.randn(2, 3 * block_tokens, 3, head_dim)
    for store in (plain, tiled):
        store.write(1, keys, values, slots)
    assert [part.order != KVOrder.by_token for part in tiled.parts(1)] == [are_tiled, are_tiled]
    table = torch.tensor([[3, 1], [0, 2]])
    for made, expected in zip(tiled.read(1, table, torch.float32), plain.read(1, table, torch.float32), strict=True):
        assert torch.equal(made, expected)
    assert torch.equal(tiled._blocks.sort(dim=1).values, plain._blocks.sort(dim=1).values)
    assert torch.equal(tiled._blocks, plain._blocks) != are_tiled
