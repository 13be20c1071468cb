"""KVStore's memory: zero, aligned, and not taken before it is written."""

from pathlib import Path

import torch

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.kv_store import KVStore


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
