"""Rounded KV: error bounds by number format, independence of tokens, and the end-to-end effect."""

import pytest
import torch
from engine_driver import greedy, run_all
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import DYNAMIC_SCALE_BYTES, KV_DTYPES, KVDtype
from llmq.runtime.kv_codec import Fp8Codec, IntCodec, make_codec

# Largest error of one number, as a share of the largest of its head: half a step of the grid (e4m3: 3 bits of
# mantissa), and the scale's own rounding.
RELATIVE_ERROR = {"int8": 0.5 / 127 + 0.005, "int4": 0.5 / 7 + 0.005, "fp8": 2**-4 + 0.005}


def codec_of(name: str):
    return make_codec(KVDtype(name, KV_DTYPES[name].bits, DYNAMIC_SCALE_BYTES))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(RELATIVE_ERROR)),
    tokens=st.integers(1, 5),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 64]),
    magnitude=st.sampled_from([1e-20, 1e-4, 1.0, 300.0, 1e30]),
    seed=st.integers(0, 100),
)
def test_the_error_is_within_half_a_step(name, tokens, heads, head_dim, magnitude, seed):
    x = torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed)) * magnitude
    x[0, 0] = 0  # a head of zeros stays one
    codec = codec_of(name)
    payload, scales = codec.encode(x)
    assert payload.dtype == codec.payload_dtype
    assert payload.shape[-1] * codec.elements_per_item == head_dim
    made = codec.decode(payload, scales, torch.float32)
    assert torch.isfinite(made).all()
    assert (made[0, 0] == 0).all()
    largest = x.abs().amax(-1, keepdim=True)
    assert ((made - x).abs() <= RELATIVE_ERROR[name] * largest + 1e-37).all()


@pytest.mark.parametrize("name", RELATIVE_ERROR)
def test_a_token_is_stored_alike_alone_and_beside_others(name):
    x = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(0))
    x[3] *= 1e4  # an outlier beside it
    payload, scales = codec_of(name).encode(x)
    for token in range(6):
        alone, own = codec_of(name).encode(x[token : token + 1])
        assert torch.equal(alone[0], payload[token])
        assert torch.equal(own[0], scales[token])


def test_static_int8_is_that_of_compressed_tensors():
    """Its own fake quantization of a symmetric 8-bit tensor with a scale: rounded half to even, saturated at -128 and
    127."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0)) * 3
    x[0, 0, :4] = torch.tensor([1e9, -1e9, 0.025, 0.075])  # beyond both ends, and halves of a step
    arguments = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor")
    expected = fake_quantize(x, torch.tensor([0.05]), torch.tensor([0]), arguments)
    codec = IntCodec(8, static_scale=0.05)
    payload, scales = codec.encode(x)
    assert (payload.dtype, scales) == (torch.int8, None)
    torch.testing.assert_close(codec.decode(payload, None, torch.float32), expected)


def test_static_fp8_saturates():
    codec = Fp8Codec(static_scale=0.1)
    payload, scales = codec.encode(torch.tensor([[[1.0, -2.0, 1e9, 44.0]]]))
    assert scales is None
    assert codec.decode(payload, None, torch.float32).flatten().tolist() == pytest.approx(
        [1.0, -2.0, 44.8, 44.0], rel=0.07
    )


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bf16", 0.02), ("int8", 0.03), ("fp8", 0.1), ("int4", 0.5)])
def test_attention_reads_what_is_stored(tiny_llama, make_engine, kv_dtype, bound):
    """Chunking, a warm prefix and company change no token, whatever the KV dtype; logits stay near those of fp32."""
    folder = tiny_llama()
    given_prompts = [[(7 * index + position) % 500 + 3 for position in range(40 + index)] for index in range(5)]
    exact = run_all(make_engine(folder), given_prompts, greedy(0, prompt_logprobs=0))
    engine = make_engine(folder, kv_dtype=kv_dtype)
    scored = run_all(engine, given_prompts, greedy(0, prompt_logprobs=0))
    differences = [
        abs(a.logprob - b.logprob)
        for one, other in zip(exact, scored, strict=True)
        for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
    ]
    assert 0 < sum(differences) / len(differences) < bound
    expected = [made.token_ids for made in run_all(engine, given_prompts, greedy(24))]
    for changes in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}):
        other = make_engine(folder, kv_dtype=kv_dtype, **changes)
        for _ in ("cold", "warm"):
            assert [made.token_ids for made in run_all(other, given_prompts, greedy(24))] == expected


def test_bytes_of_a_block_are_what_the_planner_says(tiny_llama, make_engine):
    """2 layers × 2 KV heads × (16 + 16) numbers a token, and 2 bytes of scale for each head of K and of V."""
    folder = tiny_llama()
    for kv_dtype, bytes_per_token in {
        "fp32": 512,
        "bf16": 256,
        "int8": 128 + 16,
        "fp8": 128 + 16,
        "int4": 64 + 16,
    }.items():
        engine = make_engine(folder, kv_dtype=kv_dtype, kv_cache_memory_bytes=1 << 20)
        assert engine.info.num_blocks == (1 << 20) // (16 * bytes_per_token)
        assert engine.executor.runner.store.num_bytes == engine.info.num_blocks * 16 * bytes_per_token


def test_a_checkpoints_static_scales_are_used(shared, make_engine):
    """llm-compressor's FP8 KV checkpoint: "auto" follows it; the logits stay as near as its weights' own bf16 noise."""
    folder = shared / "interop" / "llmc-fp8-kv"
    reference = torch.load(folder / "ref_logits.pt", weights_only=True)
    ids, stored = reference["input_ids"][0].tolist(), reference["logits"][0, :-1]
    errors = {}
    for kv_dtype in ("auto", "fp8", "fp32"):
        engine = make_engine(folder, kv_dtype=kv_dtype)
        made = torch.zeros_like(stored)
        engine.observe_logits(
            lambda name, position, logits, made=made: made[position : position + len(logits)].copy_(logits)
        )
        run_all(engine, [ids], greedy(0, prompt_logprobs=0))
        errors[kv_dtype] = float((made - stored).norm() / stored.norm())
        assert engine.info.fingerprint["kv_dtype"] == ("fp32" if kv_dtype == "fp32" else "fp8, static scales")
        assert engine.executor.runner.store.spec(0).scale_bytes_per_token == 0
    assert errors["auto"] == errors["fp8"] < 0.16
    assert errors["fp32"] != errors["fp8"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"kv_cache_memory_bytes": 1 << 50}, "are free here"), ({"threads": 100_000}, "--threads 100000")],
)
def test_more_than_the_machine_has_is_refused_before_weights_are_read(tiny_llama, make_engine, fields, message):
    with pytest.raises(InputError, match=message):
        make_engine(tiny_llama(), **fields)
