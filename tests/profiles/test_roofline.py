import json

import pytest

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.roofline import DecoderWork, Machine
from llmq.profiles.step_cost import StepCost, StepShape
from llmq.profiles.weight_size import parameter_count

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {**LLAMA_8B, "model_type": "mixtral", "vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2}
MACHINE = Machine("m", bandwidth_bytes_per_s=1e12, flops_per_s=1e14, how="")
TABLE = 128_256 * 4096


def work(config: dict, ranks: int = 1, bytes_each: float = 2) -> DecoderWork:
    layout = KVCacheLayout.of(ModelArchitecture.from_config(config), "bf16", tensor_parallel=ranks)
    return DecoderWork.of(config, layout, int(bytes_each * parameter_count(config)), ranks)


def test_a_decode_step_reads_all_weights_but_the_embedding_and_every_k_and_v():
    step = work(LLAMA_8B).decode(batch=4, context=1000)
    assert step.weight_bytes == 2 * (8_030_261_248 - TABLE)
    assert step.kv_bytes == 4 * 1000 * 32 * 2 * 8 * 128 * 2
    norms = 65 * 4096
    attention = 32 * 32 * 256 * 1000  # layers, heads, q·k and v, context
    assert step.flops == 2 * 4 * (8_030_261_248 - TABLE - norms + attention)
    assert step.memory_s(MACHINE) == pytest.approx(step.num_bytes / 1e12)
    assert step.floor_s(MACHINE) == step.memory_s(MACHINE) > step.compute_s(MACHINE)


def test_a_tied_head_is_the_embedding_and_is_read():
    tied = work({**LLAMA_8B, "tie_word_embeddings": True}).decode(1, 1)
    assert tied.weight_bytes == 2 * (8_030_261_248 - TABLE)
    assert tied.flops == work(LLAMA_8B).decode(1, 1).flops


def test_a_prefill_attends_to_half_of_its_square():
    step = work(LLAMA_8B).prefill(1000)
    layers = 8_030_261_248 - 2 * TABLE - 65 * 4096
    assert step.flops == 2 * (1000 * layers + TABLE + 32 * 32 * 256 * 1000 * 1001 // 2)
    assert step.is_compute_bound(MACHINE)


def test_windows_bound_what_is_read_and_attended():
    config = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 100}
    windowed, full = work(config), work({**config, "sliding_window": None})
    assert windowed.decode(1, 5000) == windowed.decode(1, 100) == full.decode(1, 100)
    seen = sum(min(position, 100) for position in range(1, 301))
    assert full.prefill(300).flops - windowed.prefill(300).flops == 2 * 32 * 32 * 256 * (300 * 301 // 2 - seen)


@pytest.mark.parametrize("window", [None, 7])
def test_a_request_is_its_prefill_and_its_decode_steps(window):
    found = work({**LLAMA_8B, "model_type": "mistral", "sliding_window": window})
    steps = found.prefill(20).flops + sum(found.decode(1, 20 + number).flops for number in range(1, 5))
    assert found.request_flops(20, 5) == steps
    cached = sum(found.decode(1, position).flops - 2 * found.head_parameters for position in range(1, 13))
    assert found.request_flops(20, 5, num_cached=12) == steps - cached


def test_experts_are_read_as_tokens_need_them():
    found = work(MIXTRAL)
    assert found.experts_read(1) == 2 / 8
    assert found.experts_read(2) == pytest.approx(1 - (6 / 8) ** 2)
    one, many = found.decode(1, 1), found.decode(500, 1)
    experts = 32 * 8 * 3 * 4096 * 14_336
    assert found.expert_bytes == pytest.approx(2 * experts)
    assert many.weight_bytes - one.weight_bytes == pytest.approx(2 * experts * 6 / 8)
    assert many.flops == pytest.approx(500 * one.flops)
    assert found.expert_parameters == experts


def test_the_batch_that_turns_compute_bound_is_where_the_times_cross():
    found = work(LLAMA_8B)
    batch = found.compute_bound_batch(MACHINE, context=10)
    assert found.decode(batch, 10).is_compute_bound(MACHINE)
    assert not found.decode(batch - 1, 10).is_compute_bound(MACHINE)
    assert batch == pytest.approx(100, rel=0.1)  # 2 bytes and 2 FLOPs a weight: 1e14 / 1e12
    assert found.compute_bound_batch(MACHINE, context=100_000) is None


def test_ranks_share_the_work():
    one, two = work(LLAMA_8B).decode(3, 500), work(LLAMA_8B, ranks=2).decode(3, 500)
    assert (two.weight_bytes, two.kv_bytes, two.flops) == (one.weight_bytes / 2, one.kv_bytes / 2, one.flops / 2)


def test_an_unknown_architecture_is_refused():
    config = {**LLAMA_8B, "model_type": "mpt"}
    layout = KVCacheLayout.of(ModelArchitecture.from_config(LLAMA_8B), "bf16")
    with pytest.raises(InputError):
        DecoderWork.of(config, layout, 10**9)


def test_real_mixtures_have_their_published_active_parameters(shared):
    path = shared / "data/configs/verbatim/Qwen--Qwen3-30B-A3B_config.json"
    found = work(json.loads(path.read_text()))
    active = found.decode(1, 0).flops / 2
    assert active == pytest.approx(3.0e9, rel=0.05)  # "30B-A3B": 3.3 B with the embedding


def test_the_terms_of_a_step_sum_to_what_it_moves_and_computes():
    decoder = work(LLAMA_8B)
    cost = StepCost.from_roofline(decoder, MACHINE)
    for batch, context in ((1, 16), (1, 1600), (48, 320)):
        step = decoder.decode(batch, context)
        both_s = step.memory_s(MACHINE) + step.compute_s(MACHINE)
        assert cost.step_s(StepShape.decode(batch, context)) == pytest.approx(both_s)
        assert step.floor_s(MACHINE) <= both_s <= 2 * step.floor_s(MACHINE)
    step = decoder.prefill(320)
    assert cost.step_s(StepShape.chunk(320)) == pytest.approx(step.memory_s(MACHINE) + step.compute_s(MACHINE))
