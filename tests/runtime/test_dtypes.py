"""What "auto" is for a checkpoint, and which KV-cache schemes are refused."""

import pytest

from llmq.profiles.errors import InputError
from llmq.runtime.config import EngineConfig
from llmq.runtime.dtypes import Dtypes


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
