"""FlashInfer behind its probe: what is asked of it (of a stand-in with its signatures, over random ragged batches), and
when it is not asked, with the reason that people read."""

import itertools
import types

import fake_flashinfer
import pytest
import torch
from attention_cases import SEQUENCES, build
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.attention.flashinfer import NUM_WRAPPERS, FlashInferAttention, choose_flashinfer
from llmq.runtime.attention.reference import ReferenceAttention
from llmq.runtime.kernels.optional import KernelPackage
from llmq.runtime.kv_store import KVStore

CPU = torch.device("cpu")


@settings(max_examples=25, deadline=None)
@given(
    sequences=st.one_of(SEQUENCES, st.lists(st.tuples(st.just(1), st.integers(0, 40)), min_size=1, max_size=4)),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (3, 1)]),
    window=st.sampled_from([None, 1, 7, 16]),
    block_tokens=st.sampled_from([1, 4, 16]),
    softcap=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 1000),
)
def test_it_is_asked_for_the_definition(sequences, heads, window, block_tokens, softcap, seed):
    queries, store, metadata = build(sequences, *heads, 8, window, block_tokens, seed)
    reference, attention = ReferenceAttention(), FlashInferAttention(fake_flashinfer, CPU)
    expected = reference(queries, 1, store, metadata, 0.3, softcap)
    prepared = attention.prepare(metadata)
    torch.testing.assert_close(attention(queries, 1, store, prepared, 0.3, softcap), expected, rtol=1e-4, atol=1e-5)
    kinds = {type(wrapper).__name__ for wrapper in prepared.planned.values()}
    is_decode = all(new == 1 for new, _ in sequences)
    assert kinds == {f"Batch{'Decode' if is_decode else 'Prefill'}WithPagedKVCacheWrapper"}


def test_a_step_is_planned_once_for_all_its_layers_and_wrappers_take_turns():
    queries, store, metadata = build([(3, 5), (1, 9)], 4, 2, 8, None, 4, 0)
    attention, used = FlashInferAttention(fake_flashinfer, CPU), []
    for _ in range(5):
        prepared = attention.prepare(metadata)
        for layer in (0, 1, 0):
            attention(queries, layer, store, prepared, 0.3)
        (wrapper,) = prepared.planned.values()
        used.append(wrapper)
    assert len(set(map(id, used))) == NUM_WRAPPERS
    assert all(one is not other for one, other in itertools.pairwise(used))
    assert sum(wrapper.num_plans for wrapper in set(used)) == 5
    attention(queries, 0, store, prepared, 0.5)  # of another scale: of another plan
    assert len(prepared.planned) == 2


def store_of(dtype="fp16", dims=(64, 64), window=None):
    spec = KVCacheSpec(2, *dims, KV_DTYPES[dtype], window)
    return KVStore(KVCacheLayout((KVCacheGroup(spec, (0, 1), 16),)), 2, CPU)


def choose(store, capability=(9, 0), dtype=torch.float16, module=fake_flashinfer):
    def import_module(name):
        assert name == "flashinfer"
        if isinstance(module, Exception):
            raise module
        return module

    return choose_flashinfer(store, dtype, 4, capability=capability, import_module=import_module)


def test_it_is_picked_where_it_serves(installed):
    installed("0.6.3")
    for store in (store_of(), store_of(window=32), store_of("bf16", (128, 128))):
        dtype = torch.bfloat16 if store.spec(0).dtype.name == "bf16" else torch.float16
        attention, why = choose(store, dtype=dtype)
        assert isinstance(attention, FlashInferAttention)
        assert why == "flashinfer-python 0.6.3"


class FailingPlan(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    def plan(self, *arguments, **options):
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist\nmore")


@pytest.mark.parametrize(
    ("version", "case", "why"),
    [
        (None, {}, "flashinfer-python is not installed"),
        ("0.2.5", {}, "flashinfer-python 0.2.5 is installed, and llmq calls >=0.3,<0.8"),
        ("1.0", {}, "flashinfer-python 1.0 is installed, and llmq calls >=0.3,<0.8"),
        ("0.6.3", {"capability": (7, 5)}, "this GPU is older than Ampere"),
        ("0.6.3", {"store": ("int8",)}, "KV blocks are in int8, and it is used for 16 bit as the activations are"),
        ("0.6.3", {"dtype": torch.bfloat16}, "KV blocks are in fp16, and it is used for 16 bit as"),
        ("0.6.3", {"store": ("fp16", (96, 96))}, "heads of 96 and 96 are none of (64, 128, 256)"),
        ("0.6.3", {"store": ("fp16", (128, 64))}, "heads of 128 and 64 are none of"),
        ("0.6.3", {"module": ImportError("libcudart.so.12: cannot open")}, "fails here: libcudart.so.12: cannot open"),
        (
            "0.6.3",
            {
                "module": types.SimpleNamespace(
                    **vars(fake_flashinfer) | {"BatchDecodeWithPagedKVCacheWrapper": FailingPlan}
                )
            },
            "fails here: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist",
        ),
    ],
)
def test_why_it_is_not_picked_is_said(installed, version, case, why):
    installed(version)
    options = {**case}
    attention, said = choose(store_of(*options.pop("store", ())), **options)
    assert attention is None
    assert why in said
    assert "\n" not in said


def test_a_package_that_is_here_is_found_by_its_own_metadata():
    assert KernelPackage("numpy", ">=1", "").why_not() is None
    assert KernelPackage("numpy", "<1", "").why_not().startswith("numpy ")
