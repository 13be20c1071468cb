"""The latency model: its parts by hand, and its error on published throughputs within what its file says."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.latency_model import Coefficients, LatencyModel, shipped_coefficients
from llmq.profiles.roofline import DecoderWork, Machine

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MACHINE = Machine("by hand", 1e9, 1e12, "", link_bytes_per_s=1e8)
NOTHING_LOST = Coefficients(1, 1, 1, 1, 0, 0, 0, 0, 0)


def model(lost: Coefficients, ranks: int = 1, **config) -> LatencyModel:
    config = {**CONFIG, **config}
    layout = KVCacheLayout.of(ModelArchitecture.from_config(config), "bf16", tensor_parallel=ranks)
    return LatencyModel(DecoderWork.of(config, layout, 200_000, ranks), MACHINE, lost)


def test_without_losses_a_step_is_what_it_reads_and_what_it_computes():
    made = model(NOTHING_LOST)
    step = made.work.decode(8, 100)
    assert made.decode_s(8, 100) == pytest.approx(step.num_bytes / 1e9 + step.flops / 1e12)


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [
        ({"bandwidth": 0.5}, lambda step: step.num_bytes / 1e9),
        ({"compute": 0.25}, lambda step: 3 * step.flops / 1e12),
        ({"step_s": 0.5}, lambda step: 0.5),
        ({"layer_s": 0.5}, lambda step: 2 * 0.5),
        ({"token_s": 0.5}, lambda step: 8 * 0.5),
        ({"compute_4_bits": 0.1, "expert_compute": 0.1, "expert_pass_s": 1.0, "hop_s": 1.0}, lambda step: 0.0),
    ],
)
def test_what_each_loss_adds(changed, seconds):
    made, plain = model(replace(NOTHING_LOST, **changed)), model(NOTHING_LOST)
    step = plain.work.decode(8, 100)
    assert made.decode_s(8, 100) - plain.decode_s(8, 100) == pytest.approx(seconds(step), abs=1e-12)


def test_ranks_share_the_work_and_talk():
    plain, two = model(NOTHING_LOST), model(replace(NOTHING_LOST, hop_s=0.25), ranks=2)
    talk = two.decode_s(8, 100) - two.work.decode(8, 100).num_bytes / 1e9 - two.work.decode(8, 100).flops / 1e12
    # 2 all-reduces in each of 2 layers: one doubling each; 2 (n - 1) / n of 8 × 64 numbers of 2 bytes, at half a link.
    assert talk == pytest.approx(4 * 0.25 + 4 * 1.0 * 8 * 64 * 2 / (1e8 / 2))
    assert two.work.decode(8, 100).num_bytes < plain.work.decode(8, 100).num_bytes


def test_a_passing_of_experts():
    moe = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    plain = model(NOTHING_LOST, **moe)
    step = plain.work.decode(4, 10)
    assert step.expert_passes == 4 * 2 * 2  # tokens, layers, experts of a token
    assert step.expert_flops == 2 * 4 * 2 * (2 * 3 * 64 * 128)
    slow = model(replace(NOTHING_LOST, expert_compute=0.5, expert_pass_s=1e-3), **moe)
    added = slow.decode_s(4, 10) - plain.decode_s(4, 10)
    assert added == pytest.approx(step.expert_flops / 1e12 + step.expert_passes * 1e-3)


def test_requests_that_are_always_running():
    """A token of each costs a step and its share of prompts; throughput is what comes in that time."""
    made = model(shipped_coefficients())
    tpot = made.tpot_s(16, 100, 50)
    assert tpot == pytest.approx(made.decode_s(16, 125) + 16 / 50 * made.prefill_s(100))
    assert made.tokens_per_s(16, 100, 50) == pytest.approx(16 / tpot)
    busy, prefill = 16 / 50 * made.prefill_s(100) / tpot, made.prefill_s(100)
    wait = prefill / (2 * (1 - busy)) * max(0, math.log(busy / 0.01))
    assert made.ttft_s(16, 100, 50, 0.99) == pytest.approx(made.decode_s(16, 100) + prefill + wait)
    assert made.ttft_s(16, 100, 50, 0.99) > made.ttft_s(16, 100, 50, 0.5)


@pytest.fixture(scope="module")
def fitting():
    path = Path(__file__).parent.parent / "bench" / "fit_latency_model.py"
    spec = importlib.util.spec_from_file_location("fit_latency_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_published_throughputs_by_the_shipped_coefficients(shared, fitting):
    """204 points, 16.7 % off on average, and the interval holds what it says (it was taken where models were left
    out)."""
    points = fitting.read_points(shared / "planner" / "throughput_points.json", shared / "data" / "configs")
    lost = shipped_coefficients()
    errors = np.array([point.error(lost) for point in points])
    assert len(points) == 204
    assert np.mean(np.abs(errors)) < 0.17
    inside = np.mean([(lost.low <= 1 + error) & (1 + error <= lost.high) for error in errors])
    assert inside > 0.8


def test_a_whole_gpu_and_a_whole_model_that_were_left_out(shared, fitting):
    """Of the points of the first fit, whose errors were 22.7 % by models and 16.6 % by GPUs. One fold of each kind:
    all of them take minutes, and are what the script prints."""
    points = fitting.read_points(shared / "planner" / "throughput_points.json", shared / "data" / "configs")
    first = [point for point in points if "roofline_fit_pred_tok_s" in point.row]
    for key, name in (("gpu", "H200"), ("model", "Llama-3.3-70B")):
        made = fitting.fit([point for point in first if point.row[key] != name])
        errors = [abs(point.error(made)) for point in first if point.row[key] == name]
        assert np.mean(errors) < fitting.FIRST_FIT[key]
