"""What "auto" is for a checkpoint, and which KV-cache schemes are refused."""

import pytest

from llmq.profiles.errors import InputError
from llmq.runtime import dtypes as dtypes_module
from llmq.runtime.config import EngineConfig
from llmq.runtime.dtypes import Dtypes, runs_native


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
