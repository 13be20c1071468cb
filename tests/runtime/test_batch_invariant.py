"""--batch-invariant: the same bits alone, in company, in chunks, from the cache and after preemption, in any dtype."""

import random
from functools import partial

import pytest
import torch
from attention_cases import SEQUENCES, build
from engine_driver import force_preemption, run_all
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.profiles.errors import InputError
from llmq.runtime.attention.reference import ReferenceAttention
from llmq.runtime.attention.tiled import TiledAttention
from llmq.runtime.kernels import native, why_absent
from llmq.runtime.sampling_params import SamplingParams


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 500) for _ in range(rng.randint(1, 150))] for _ in range(count)]


def bits(made) -> list:
    """Tokens and log probabilities, to the last bit."""
    return [(c.token_ids, [(e.token_id, e.logprob, e.top) for e in c.logprobs]) for c in made]


MODELS = [
    ("bf16", {}),
    ("fp32", {"num_key_value_heads": 1}),
    ("bf16", {"model_type": "mistral", "sliding_window": 40}),
    ("fp16", {"model_type": "qwen3"}),
]


@pytest.mark.parametrize(("dtype", "model"), MODELS, ids=repr)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_same_bits_whatever_else_runs(tiny_llama, make_engine, dtype, model, kv_dtype):
    folder = tiny_llama(**model)
    given_prompts = prompts(10)
    params = [
        SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=20, ignore_eos=True, logprobs=3)
        for index in range(10)
    ]

    def make(**changes):
        return make_engine(folder, dtype=dtype, kv_dtype=kv_dtype, batch_invariant=True, **changes)

    expected = bits(run_all(make(max_num_seqs=1), given_prompts, params))
    for changes in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 6}, {"max_num_batched_tokens": 61}):
        engine = make(**{"max_num_seqs": 16, **changes})
        for _ in ("cold", "warm"):
            assert bits(run_all(engine, given_prompts, params)) == expected
    block_bytes = engine.info.kv_cache_bytes // engine.info.num_blocks
    tight = make(kv_cache_memory_bytes=30 * block_bytes, max_model_len=192, max_num_batched_tokens=64)
    force_preemption(tight)
    assert bits(run_all(tight, given_prompts, params)) == expected


def test_without_it_bits_do_change(tiny_llama, make_engine):
    """Else the test above would prove nothing."""
    given_prompts = prompts(10)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
    make = partial(make_engine, tiny_llama(), dtype="bf16", kernels="torch")
    alone = bits(run_all(make(max_num_seqs=1), given_prompts, params))
    assert bits(run_all(make(), given_prompts, params)) != alone


def test_our_own_kernels_need_no_fixed_rows(tiny_llama, make_engine):
    if native is None:
        pytest.skip(f"no native kernels here: {why_absent}")
    fingerprint = make_engine(tiny_llama(), dtype="bf16", batch_invariant=True).info.fingerprint
    assert fingerprint["linear_kernels"] == f"native bf16, {native.isa()}"


def test_the_fingerprint_says_so(tiny_llama, make_engine):
    fingerprint = make_engine(tiny_llama(), batch_invariant=True).info.fingerprint
    assert "batch-invariant" in fingerprint["attention_kernel"]
    assert "32 rows at a time" in fingerprint["linear_kernels"]


@settings(max_examples=40, deadline=None)
@given(
    sequences=SEQUENCES,
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (24, 1)]),
    window=st.sampled_from([None, 1, 7, 16]),
    block_tokens=st.sampled_from([1, 4, 16, 88]),
    longer=st.sampled_from([0, 120, 300]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 1000),
)
def test_tiles_equal_the_definition(sequences, heads, window, block_tokens, longer, softcap, seed):
    sequences = [(new, before + longer) for new, before in sequences[:3]]
    queries, store, metadata = build(sequences, *heads, 8, window, block_tokens, seed)
    tiled, reference = TiledAttention(heads[0] // heads[1]), ReferenceAttention()
    made, expected = (
        backend(queries, 1, store, backend.prepare(metadata), 0.3, softcap) for backend in (tiled, reference)
    )
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_a_model_whose_products_are_not_ours_is_refused(tiny_llama, make_engine):
    folder = tiny_llama(model_type="stablelm", partial_rotary_factor=0.5)
    with pytest.raises(InputError, match="--batch-invariant"):
        make_engine(folder, batch_invariant=True)
