"""vLLM's pool against what it logged: tokens of a pool, requests at once, what one request takes."""

import json

import pytest

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.cache_layers import AttentionLayer
from llmq.profiles.errors import InputError
from llmq.profiles.vllm_pool import VllmPool
from llmq.profiles.vllm_version import VllmVersion

GIB = 2**30
# Points whose model's config is there; the version where the point names none exactly, bits of K and V.
POINTS = {
    "qwen3-235b-fp8-4xH100-vllm": ("verbatim/Qwen--Qwen3-235B-A22B_config.json", "0.9.2", 16),
    "llama2-7b-A100-80-v0.2": ("extracted/mlc--llama2_7b.json", "0.2.4", 16),
    "llama2-70b-4xA100-80-v0.2": ("extracted/mlc--llama2_70b.json", "0.2.4", 16),
    "llama3.1-8b-3090-20000": ("verbatim/meta-llama--Meta-Llama-3.1-8B_config.json", "0.6.4", 16),
    "llama3.1-8b-3090-29000": ("verbatim/meta-llama--Meta-Llama-3.1-8B_config.json", "0.6.4", 16),
    "llama3.1-8b-L40S-v1": ("verbatim/meta-llama--Meta-Llama-3.1-8B_config.json", "0.8.4", 16),
    "llama3.1-70b-w8a8-H100-v1": ("verbatim/meta-llama--Meta-Llama-3.1-70B_config.json", "0.7.0", 16),
    "deepseek-v3-8xMI308-v1": ("verbatim/deepseek-ai--DeepSeek-V3_config.json", "0.8.2", 16),
    "llama3-8b-A40-v0.5.2": ("verbatim/meta-llama--Meta-Llama-3.1-8B_config.json", "0.5.2", 16),
    "gemma4-31b-2xB70-vllm": ("extracted/maxtext--gemma4_31b.json", "0.22", 16),
    "qwen3.6-35b-a3b-nvfp4-5090": ("verbatim/Qwen--Qwen3.5-35B-A3B_config.json", "0.24.0", 8),
    "qwen3.8-27b-fp8-2x3090": ("verbatim/Qwen--Qwen3.5-27B_config.json", "0.30", 8),
    "llama3.1-405b-fp8-8xH100": ("verbatim/meta-llama--Meta-Llama-3.1-405B_config.json", "0.5.3.post1", 16),
    "mixtral-awq-2xA100": ("verbatim/mistralai--Mixtral-8x7B-v0.1_config.json", "0.2.7", 16),
    "qwen3-30b-fp8-2x4090": ("verbatim/Qwen--Qwen3-30B-A3B_config.json", "0.9.0", 16),
    "gpt-oss-120b-H100": ("verbatim/openai--gpt-oss-120b_config.json", "0.11.0", 16),
    "gemma3-4b-vllm-hybrid": ("extracted/maxtext--gemma3_4b.json", "0.11.0", 16),
}
WITH_TOKENS = [name for name in POINTS if name not in ("gpt-oss-120b-H100", "gemma3-4b-vllm-hybrid")]


@pytest.fixture(scope="module")
def points(shared):
    return {row["id"]: row for row in json.loads((shared / "planner" / "engines_kv_points.json").read_text())["points"]}


def pool_of(shared, point: dict) -> VllmPool:
    file, version, bits = POINTS[point["id"]]
    architecture = ModelArchitecture.from_config(json.loads((shared / "data" / "configs" / file).read_text()))
    return VllmPool.of(
        architecture,
        VllmVersion.parse(version),
        kv_bits=bits,
        ranks=point["tp"],
        step_tokens=point.get("max_num_batched_tokens", 8192),
    )


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_tokens_of_a_logged_pool_within_1_2_percent(shared, points, name):
    """Six logged GiB and tokens apart; the GiB of the others were noted by their tokens: shapes alone are checked."""
    point = points[name]
    pool = pool_of(shared, point)
    tokens = pool.logged_tokens(pool.num_blocks(point["kv_gib"] * GIB), point.get("max_model_len", 4096))
    assert tokens == pytest.approx(point["reported_tokens"], rel=0.012)


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b-nvfp4-5090", "qwen3.8-27b-fp8-2x3090", "gemma4-31b-2xB70-vllm"])
def test_requests_at_once_of_hybrids_as_logged(shared, points, name):
    point = points[name]
    pool = pool_of(shared, point)
    found = pool.concurrency(pool.num_blocks(point["kv_gib"] * GIB), point["max_model_len"])
    assert found == pytest.approx(point["max_concurrency"], abs=0.006)


def test_gemma_3s_two_logged_sizes_agree_with_its_groups(shared, points):
    """317,136 tokens by 7 tables of blocks of 16, 102.78 requests: the same number of blocks."""
    point = points["gemma3-4b-vllm-hybrid"]
    pool = pool_of(shared, point)
    assert sum(group.count for group in pool.groups) == 7
    num_blocks = point["reported_tokens"] // 16 * 7
    assert pool.concurrency(num_blocks, point["max_model_len"]) == pytest.approx(point["max_concurrency"], abs=0.006)


def test_a_request_that_vllm_refused_by_its_bytes(shared, points):
    """It said that one request of 131,072 tokens needs 4.54 GiB."""
    point = points["gpt-oss-120b-H100"]
    pool = pool_of(shared, point)
    assert round(pool.blocks_for(point["max_model_len"]) * pool.block_bytes / GIB, 2) == 4.54


def decoder(*windows: int | None, heads: int = 2) -> ModelArchitecture:
    layers = tuple(AttentionLayer(heads, 64, 64, window) for window in windows)
    return ModelArchitecture("test", 256, 512, len(layers), 4, 1000, 4096, True, "bfloat16", layers)


def test_groups_of_layers_by_hand():
    """3 full layers and 6 with a window: groups of 3, one block table for the full ones and two for the others."""
    made = decoder(*[None, 100, 100] * 3)
    pool = VllmPool.of(made, VllmVersion.parse("0.11.0"), kv_bits=16, step_tokens=64)
    assert pool.block_bytes == 3 * 16 * 2 * 128 * 2
    # 1,024 tokens are 64 blocks; a window holds 99 + 64 tokens, 11 blocks, and one more for where it starts.
    assert pool.blocks_for(1024) == 64 + 2 * 12
    assert pool.logged_tokens(90, 1024) == 90 // 3 * 16


def test_what_versions_change():
    made = decoder(*[None, 100, 100] * 3)
    old = VllmPool.of(made, VllmVersion.parse("0.8.5"), kv_bits=16, step_tokens=64)
    assert old.blocks_for(1024) == 64  # every layer keeps all
    assert old.block_bytes == 9 * 16 * 2 * 128 * 2
    new = VllmPool.of(made, VllmVersion.parse("v0.24.0rc1"), kv_bits=16, step_tokens=64)
    assert new.logged_tokens(100, 1024) == int(100 / new.blocks_for(1024) * 1024)
    assert [VllmVersion.parse(name).counts_graphs for name in ("0.20.2", "0.21.0")] == [False, True]
    with pytest.raises(InputError, match=r"vllm@latest: no version"):
        VllmVersion.parse("latest")


def test_defaults_of_a_step():
    small, large = int(23.6 * GIB), int(79.2 * GIB)
    v0, v1 = VllmVersion.parse("0.6.4"), VllmVersion.parse("0.11.0")
    assert [v0.batched_tokens(small, "RTX 3090", length) for length in (1000, 20_000, 40_000)] == [2048, 20_000, 2048]
    assert [v1.batched_tokens(large, gpu, 20_000) for gpu in ("H100 SXM", "A100-80GB SXM")] == [8192, 2048]
    assert [v1.num_seqs(large, "H100 SXM"), v1.num_seqs(small, "RTX 3090")] == [1024, 256]
