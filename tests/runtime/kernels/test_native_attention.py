"""The native attention and its KV writer, each instruction set, over random ragged batches in a scattered store."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.profiles.kv_spec import DYNAMIC_SCALE_BYTES, KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec, KVDtype
from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.dtypes import NativeNumerics
from llmq.runtime.kernels import native, why_absent
from llmq.runtime.kv_store import TILE_TOKENS, KVStore, Slots

if native is None:
    pytest.skip(why_absent, allow_module_level=True)

from llmq.runtime.attention.native import NativeAttention, native_planes, rounds_to_bytes

ISAS = native.isas()
SCALES = {0: (1.0, 1.0), 1: (0.02, 0.03)}
# Relative to the whole output: a bfloat16 has 8 bits, and its weights and its result are rounded.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
# Where what integers are multiplied with has 8 bits too.
BOUND_OF_BYTES = 4e-2
ROUNDING = NativeNumerics(int8_activations=True)


@pytest.fixture(autouse=True)
def own_instruction_set():
    threads = native.num_threads()
    yield
    native.force_isa(native.native_isa())
    native.set_num_threads(threads)


def make_store(lengths, kv_heads, head_dim, window, block_tokens, kv_dtype, static, seed, in_tiles=True):
    """A store of poison, and a block table of shuffled blocks for sequences of these lengths."""
    scale_bytes = 0 if static or KV_DTYPES[kv_dtype].bits > 8 else DYNAMIC_SCALE_BYTES
    dtype = KVDtype(kv_dtype, KV_DTYPES[kv_dtype].bits, scale_bytes)
    spec = KVCacheSpec(kv_heads, head_dim, head_dim, dtype, window)
    layout = KVCacheLayout((KVCacheGroup(spec, (0, 1), block_tokens),))
    sizes = [-(-length // block_tokens) for length in lengths]
    store = KVStore(layout, sum(sizes) + 3, torch.device("cpu"), SCALES if static else None, in_tiles=in_tiles)
    store._blocks.fill_(255)  # NaN in every float format
    order = torch.randperm(sum(sizes) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lengths), max(sizes)), order.pop())  # padding: a block of nothing but poison
    for row, size in enumerate(sizes):
        table[row, :size] = torch.tensor([order.pop() for _ in range(size)])
    return store, table


def stored_at(store, slots):
    """K and V of layer 1 as they are stored: [n, kv_heads, dim] each."""
    index = torch.arange(len(slots.block))
    return [part.read(slots.block, torch.float32)[index, slots.offset] for part in store.parts(1)]


def slots_of(table_row, positions, block_tokens):
    return Slots.of(table_row[positions // block_tokens] * block_tokens + positions % block_tokens, block_tokens)


def test_tiles_are_of_as_many_tokens_on_both_sides():
    assert native.TILE_TOKENS == TILE_TOKENS


def defined(queries, keys, values, before, window, scale, softcap):
    """Attention of one sequence in float64: queries [n, heads, dim], keys and values [length, kv_heads, dim]."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(groups, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(len(queries))[:, None] + before, torch.arange(len(keys))
    seen = (key <= query) & (key > query - (window or len(keys)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), values)


@settings(max_examples=60, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    sequences=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 5, 33]), st.sampled_from([0, 3, 15, 16, 40, 63, 64, 255, 256, 319, 700])),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (8, 1), (14, 2), (16, 1), (17, 1), (32, 8)]),
    head_dim=st.sampled_from([8, 12, 64, 80, 128, 192]),
    window=st.sampled_from([None, None, 1, 7, 64, 300]),
    block_tokens=st.sampled_from([1, 4, 16, 24, 32]),
    in_tiles=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 20.0]),
    kv_dtype=st.sampled_from(["fp32", "fp16", "bf16", "int8", "fp8", "int4"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    static=st.booleans(),
    rounds=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_attention_equals_float64(
    isa,
    sequences,
    heads,
    head_dim,
    window,
    block_tokens,
    in_tiles,
    softcap,
    kv_dtype,
    dtype,
    static,
    rounds,
    threads,
    seed,
):
    native.force_isa(isa)
    native.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    lengths = [new + before for new, before in sequences]
    static = static and kv_dtype in ("int8", "fp8")
    store, table = make_store(lengths, heads[1], head_dim, window, block_tokens, kv_dtype, static, seed, in_tiles)
    starts, expected = [0], []
    queries = torch.randn(sum(new for new, _ in sequences), heads[0], head_dim, generator=generator).to(dtype)
    for row, (new, before) in enumerate(sequences):
        positions = torch.arange(new + before)
        if window is not None:  # what left every window of the step is another's: poison stays
            positions = positions[max(0, before - window + 1) :]
        keys, values = torch.randn(2, len(positions), heads[1], head_dim, generator=generator).to(dtype)
        slots = slots_of(table[row], positions, block_tokens)
        store.write(1, keys, values, slots)
        stored = stored_at(store, slots)
        starts.append(starts[-1] + new)
        mine = queries[starts[-2] : starts[-1]]
        expected.append(defined(mine, *stored, before - int(positions[0]), window, 0.3, softcap))
    metadata = AttentionMetadata(starts, lengths, table, slots, block_tokens, window)
    attention = NativeAttention(rounds)
    made = attention(queries, 1, store, attention.prepare(metadata), 0.3, softcap)
    expected = torch.cat(expected)
    has_bytes = rounds and rounds_to_bytes(ROUNDING, store.layout) and dtype == torch.bfloat16
    error = float((made.double() - expected).norm() / expected.norm())
    assert error < (BOUND_OF_BYTES if has_bytes else BOUND[dtype])

    # To the last bit: by other threads and splits, and of each query that is computed alone.
    native.set_num_threads(4 - threads)
    assert torch.equal(attention(queries, 1, store, attention.prepare(metadata), 0.3, softcap), made)
    row = seed % len(sequences)
    last = starts[row + 1] - 1
    alone = AttentionMetadata([0, 1], [lengths[row]], table[row : row + 1], slots, block_tokens, window)
    again = attention(queries[last : last + 1], 1, store, attention.prepare(alone), 0.3, softcap)
    assert torch.equal(again[0], made[last])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("peak", [0.02, 0.125, 1.0])  # of the softmax: nearly flat to nearly one key's
@pytest.mark.parametrize("rounds", [False, True])
def test_integer_products_add_little_to_what_the_codec_rounds(isa, kv_dtype, peak, rounds):
    """Queries and weights become integers beside 8-bit K and V: what that adds, beyond rounding the result to bfloat16,
    is below a fiftieth of the error that K and V in this dtype have; of 8 bits, below twice that of INT8, or an eighth
    of that of INT4."""
    native.force_isa(isa)
    length, new, heads, kv_heads, head_dim = 1500, 4, 9, 3, 64
    store, table = make_store([length], kv_heads, head_dim, None, 16, kv_dtype, False, 0)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(new, heads, head_dim, generator=generator).bfloat16()
    keys, values = torch.randn(2, length, kv_heads, head_dim, generator=generator).bfloat16()
    slots = slots_of(table[0], torch.arange(length), 16)
    store.write(1, keys, values, slots)
    stored = stored_at(store, slots)
    metadata = AttentionMetadata([0, new], [length], table, slots, 16, None)

    def attend(attention):
        return attention(queries, 1, store, attention.prepare(metadata), peak)

    made = attend(NativeAttention(rounds))
    exact = defined(queries, keys, values, length - new, None, peak, None)
    rounded = defined(queries, *stored, length - new, None, peak, None)
    of_codec = float((rounded - exact).norm())
    of_result = float((rounded.bfloat16().double() - rounded).norm())
    added = max(0.0, float((made.double() - rounded).norm()) ** 2 - of_result**2) ** 0.5
    # What is rounded where, the engine's fingerprint says.
    asked = rounds and rounds_to_bytes(ROUNDING, store.layout)
    assert torch.equal(made, attend(NativeAttention(asked)))
    assert asked == (not torch.equal(made, attend(NativeAttention())))
    assert added < of_codec * ({"int8": 2, "int4": 1 / 8}[kv_dtype] if rounds else 1 / 50)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [200, 256, 1000])
def test_small_weights_beside_a_large_one_keep_their_share(isa, length):
    """One key's weight is 600 times that of any other: rounded to the nearest of 256 steps they would all be nothing,
    and together they are a quarter of the sum and more."""
    native.force_isa(isa)
    store, table = make_store([length], 1, 64, None, 16, "int8", False, 0)
    queries, keys, values = torch.zeros(1, 1, 64), torch.zeros(length, 1, 64), -torch.ones(length, 1, 64)
    queries[..., 0] = 1.0
    keys[0, 0, 0], values[0] = math.log(600), 1.0
    slots = slots_of(table[0], torch.arange(length), 16)
    store.write(1, keys.bfloat16(), values.bfloat16(), slots)
    attention = NativeAttention(rounds_to_bytes=True)
    prepared = attention.prepare(AttentionMetadata([0, 1], [length], table, slots, 16, None))
    made = attention(queries.bfloat16(), 1, store, prepared, 1.0).double()
    expected = (600 - (length - 1)) / (600 + (length - 1))
    assert abs(made - expected).max() < 0.02


@settings(max_examples=40, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    tokens=st.integers(1, 70),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 12, 64, 80]),
    kv_dtype=st.sampled_from(["fp32", "fp16", "bf16", "int8", "fp8", "int4"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    static=st.booleans(),
    in_tiles=st.booleans(),
    magnitude=st.sampled_from([1e-20, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_what_is_written_is_what_the_codec_writes(
    isa, tokens, kv_heads, head_dim, kv_dtype, dtype, static, in_tiles, magnitude, seed
):
    """Payload and scales to the last bit, and nothing beside them."""
    native.force_isa(isa)
    static = static and kv_dtype in ("int8", "fp8")
    made, table = make_store([tokens], kv_heads, head_dim, None, 16, kv_dtype, static, seed, in_tiles)
    expected, _ = make_store([tokens], kv_heads, head_dim, None, 16, kv_dtype, static, seed, in_tiles)
    slots = slots_of(table[0], torch.arange(tokens), 16)
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, tokens, kv_heads, head_dim, generator=generator) * magnitude).to(dtype)
    keys[0] = 0
    if kv_dtype != "fp16":
        values[-1, -1, -1] = math.inf if kv_dtype in ("fp32", "bf16") else 3e38
    expected.write(1, keys, values, slots)
    for plane, x in zip(native_planes(made)[1], (keys, values), strict=True):
        plane.write(
            x.data_ptr(), dtype == torch.float32, x.stride(0), slots.block.data_ptr(), slots.offset.data_ptr(), tokens
        )
    assert torch.equal(made._blocks, expected._blocks)
