"""What "auto" is for a checkpoint, and which KV-cache schemes are refused."""

from pathlib import Path

import pytest

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.safetensors_file import TensorInfo
from llmq.runtime import dtypes as dtypes_module
from llmq.runtime.config import EngineConfig
from llmq.runtime.dtypes import Dtypes, NativeNumerics, native_numerics, runs_native
from llmq.runtime.memory import weight_bytes


def dtypes(scheme, kv_dtype="auto"):
    quantization = None if scheme is None else {"kv_cache_scheme": scheme}
    return Dtypes.of("bfloat16", quantization, EngineConfig(model="m", kv_dtype=kv_dtype))


def kv(**changes):
    return {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, **changes}


def test_what_the_checkpoint_asks_for():
    assert dtypes(None) == Dtypes("bf16", "bf16", False)
    assert dtypes(kv()) == Dtypes("bf16", "fp8", True)
    assert dtypes(kv(dynamic=True)) == Dtypes("bf16", "fp8", False)
    assert dtypes(kv(type="int")) == Dtypes("bf16", "int8", True)
    assert dtypes(kv(type="int", dynamic=True)) == Dtypes("bf16", "int8", False)


def test_another_kv_dtype_than_the_checkpoints_has_scales_of_its_own():
    assert dtypes(kv(), "int8") == Dtypes("bf16", "int8", False)
    assert dtypes(kv(type="int"), "fp8") == Dtypes("bf16", "fp8", False)
    assert dtypes(kv(type="int"), "int8") == Dtypes("bf16", "int8", True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"type": "int", "strategy": "attn_head"}, "int8, static per attn_head"),
        ({"strategy": "attn_head"}, "float8, static per attn_head"),
        ({"num_bits": 4}, "float4, static per tensor"),
        ({"symmetric": False}, "asymmetric float8, static per tensor"),
    ],
)
def test_what_is_not_run_is_refused_by_name_unless_overruled(changes, named):
    with pytest.raises(InputError, match=named):
        dtypes(kv(**changes))
    assert dtypes(kv(**changes), "bf16") == Dtypes("bf16", "bf16", False)
    assert dtypes(kv(**changes), "fp8") == Dtypes("bf16", "fp8", False)


def test_a_scheme_that_is_only_a_word_is_refused():
    with pytest.raises(InputError, match="'static'"):
        dtypes("static")


@pytest.mark.parametrize("asked", ["auto", "native"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_native_kernels_are_used_where_they_are(monkeypatch, asked, dtype):
    monkeypatch.setattr(dtypes_module, "native", object())
    assert runs_native(asked, dtype, "cpu")
    assert not runs_native("torch", dtype, "cpu")


def test_native_kernels_that_cannot_be_are_refused_only_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(dtypes_module, "native", None)
    monkeypatch.setattr(dtypes_module, "why_absent", "this CPU has no AVX2")
    monkeypatch.setattr(dtypes_module, "triton_runs", lambda device: False)
    assert not runs_native("auto", "bf16", "cpu")
    assert not runs_native("auto", "bf16", "cuda")
    for dtype, device, reason in [
        ("bf16", "cpu", "this CPU has no AVX2"),
        ("bf16", "cuda", "--device is cuda"),
    ]:
        with pytest.raises(InputError, match=reason):
            runs_native("native", dtype, device)
    monkeypatch.setattr(dtypes_module, "native", object())
    with pytest.raises(InputError, match="--dtype is fp16"):
        runs_native("native", "fp16", "cpu")


def checkpoint(quantization=None, head="BF16", tied=False, model_type="llama"):
    config = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    names = {"model.embed_tokens.weight": "BF16"} | ({} if tied else {"lm_head.weight": head})
    tensors = {name: TensorInfo(name, dtype, (40, 64), 40 * 64 * 2, "f") for name, dtype in names.items()}
    return Checkpoint(Path("m"), config, tensors, quantization)


def numerics(stored, dtype="bf16", device="cpu", **options):
    engine = EngineConfig(model="m", **options)
    return native_numerics(stored, engine, Dtypes(dtype, "bf16", False), device)


INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def test_a_head_is_rounded_where_the_layers_are(monkeypatch):
    monkeypatch.setattr(dtypes_module, "native", object())
    assert numerics(checkpoint(INT4)) == NativeNumerics(int8_head=True)
    assert numerics(checkpoint(INT4, tied=True)) == NativeNumerics(int8_head=True)
    assert numerics(checkpoint(INT4), head="16bit") == NativeNumerics()
    assert numerics(checkpoint()) == NativeNumerics()
    assert numerics(checkpoint(), head="int8") == NativeNumerics(int8_head=True)
    assert numerics(checkpoint(INT4), activations="int8") == NativeNumerics(int8_head=True, int8_activations=True)
    # What has no kernel for it, or is stored in fewer bits, stays as it is.
    assert numerics(checkpoint(INT4, head="I32")) == NativeNumerics()
    assert numerics(checkpoint(INT4), dtype="fp32") == NativeNumerics()
    assert numerics(checkpoint(INT4, model_type="gpt_neox")) == NativeNumerics()
    assert numerics(checkpoint(INT4), kernels="torch") is None
    for runs, on_gpu in ((True, NativeNumerics()), (False, None)):
        monkeypatch.setattr(dtypes_module, "triton_runs", lambda device, runs=runs: runs and device == "cuda")
        assert numerics(checkpoint(INT4), device="cuda") == on_gpu


@pytest.mark.parametrize(
    ("stored", "options", "reason"),
    [
        (checkpoint(INT4), {"head": "int8", "kernels": "torch"}, "--head int8: native kernels do that"),
        (checkpoint(INT4), {"head": "int8", "dtype": "fp32"}, "--head int8: native kernels do that"),
        (checkpoint(INT4), {"activations": "int8", "kernels": "torch"}, "--activations int8: native kernels do that"),
        (checkpoint(INT4, model_type="gpt_neox"), {"activations": "int8"}, "of a decoder of llmq's own"),
        (checkpoint(INT4, head="I32"), {"head": "int8"}, "the checkpoint's head is quantized"),
        (checkpoint(INT4, head="I32"), {"head": "16bit"}, "the checkpoint's head is quantized"),
        (checkpoint(), {"activations": "int8"}, "the checkpoint's are in 16 bit"),
    ],
)
def test_numerics_that_cannot_be_had_are_refused(monkeypatch, stored, options, reason):
    monkeypatch.setattr(dtypes_module, "native", object())
    with pytest.raises(InputError, match=reason):
        numerics(stored, **options)


def test_a_packed_head_counts(monkeypatch):
    """A tied one beside the embedding's rows, in blocks of 16 outputs; another one instead of what is stored."""
    stored, tied = checkpoint(), checkpoint(tied=True)
    bf16 = Dtypes("bf16", "bf16", False)
    head, packed, int8 = 40 * 64 * 2, 48 * 64 * 2, 48 * (64 + 4)
    assert weight_bytes(tied, bf16, None) == head
    assert weight_bytes(tied, bf16, NativeNumerics()) == head + packed
    assert weight_bytes(tied, bf16, NativeNumerics(int8_head=True)) == head + int8
    assert weight_bytes(stored, bf16, NativeNumerics()) == head + packed
    assert weight_bytes(stored, bf16, NativeNumerics(int8_head=True)) == head + int8
    assert weight_bytes(tied, Dtypes("fp32", "fp32", False), NativeNumerics()) == 2 * head


def test_triton_kernels_are_used_on_a_gpu_and_refused_where_they_cannot_be(monkeypatch):
    monkeypatch.setattr(dtypes_module, "triton_runs", lambda device: device == "cuda")
    assert runs_native("auto", "bf16", "cuda")
    assert runs_native("triton", "bf16", "cuda")
    assert not runs_native("torch", "bf16", "cuda")
    with pytest.raises(InputError, match="they are for GPUs, and --device is cpu"):
        runs_native("triton", "bf16", "cpu")
    monkeypatch.setattr(dtypes_module, "triton_runs", lambda device: False)
    with pytest.raises(InputError, match="triton is not installed here"):
        runs_native("triton", "bf16", "cuda")
