"""Bytes a token against what engines logged: their KV-cache in bytes, and the tokens that they said it holds."""

import json

import pytest

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.kv_spec import KVCacheLayout

CONFIGS = {
    "qwen3-235b-fp8-4xH100-vllm": "verbatim/Qwen--Qwen3-235B-A22B_config.json",
    "qwen3-235b-fp8-4xH100-sglang": "verbatim/Qwen--Qwen3-235B-A22B_config.json",
    "llama3.1-8b-3090-20000": "verbatim/meta-llama--Meta-Llama-3.1-8B_config.json",
    "llama3.1-8b-3090-29000": "verbatim/meta-llama--Meta-Llama-3.1-8B_config.json",
    "llama2-7b-sq-A100-trtllm": "extracted/mlc--llama2_7b.json",
    "tinyllama-trtllm": "extracted/mlc--tinyllama_1b_chat_v1.0.json",
    "qwen3-moe-30b-MI355X-sglang": "verbatim/Qwen--Qwen3-30B-A3B_config.json",
    "gpt-oss-120b-H100": "verbatim/openai--gpt-oss-120b_config.json",
}


@pytest.fixture(scope="module")
def points(shared):
    return {row["id"]: row for row in json.loads((shared / "planner" / "engines_kv_points.json").read_text())["points"]}


def layout(shared, name: str, ranks: int = 1) -> KVCacheLayout:
    config = json.loads((shared / "data" / "configs" / CONFIGS[name]).read_text())
    return KVCacheLayout.of(ModelArchitecture.from_config(config), "bf16", tensor_parallel=ranks)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt-oss-120b-H100"])
def test_tokens_of_a_logged_pool_within_1_2_percent(shared, points, name):
    """Points whose bytes and tokens were logged apart. A log rounds its GiB to two places; ranks differ by 1.1 %."""
    point = points[name]
    num_bytes = point.get("kv_bytes") or point["kv_gib"] * 2**30
    tokens = num_bytes / layout(shared, name, point["tp"]).bytes_per_token
    assert tokens == pytest.approx(point["reported_tokens"], rel=0.012)


def test_a_request_that_vllm_refused_by_its_bytes(shared, points):
    """It said that one request of 131,072 tokens needs 4.54 GiB: window layers hold a window and a step."""
    point = points["gpt-oss-120b-H100"]
    made = layout(shared, "gpt-oss-120b-H100")
    reserved = made.reserved_bytes(point["max_model_len"], point["max_num_batched_tokens"])
    assert round(reserved / 2**30, 2) == 4.54
