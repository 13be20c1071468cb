"""Every decoder family against transformers on a random model in float32: logits, and greedy tokens under schedules."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from engine_driver import Reference, force_preemption, greedy, run_all
from family_cases import CASES, LONGROPE, MOE
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model
from transformers_oracle import check_against_transformers

from llmq.profiles.errors import InputError
from llmq.profiles.families import FAMILIES
from llmq.quantize.formats.compressed_tensors import ConfigGroup, QuantizationConfig, to_tensors
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.rounding import quantize_weight
from llmq.runtime.request import EngineRequest


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_logits_and_tokens_equal_transformers(tmp_path, make_engine, model_type, changes):
    check_against_transformers(save_tiny_model(tmp_path, model_type, **changes), make_engine)


def test_every_family_is_compared():
    assert {model_type for model_type, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("phi3", {}),  # fused projections
        ("gemma3_text", {"head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 2}),
        ("mixtral", {**MOE, "intermediate_size": 64}),
        ("qwen3_moe", {**MOE, "moe_intermediate_size": 64}),
    ],
)
def test_quantized_linears_run_in_any_family(tmp_path, make_engine, model_type, changes):
    """Experts and fused projections too: the packed integers give the logits of their values written out in float32."""
    source = save_tiny_model(tmp_path / "source", model_type, **changes)
    quantized, written_out = save_quantized(source, tmp_path)
    seen = []
    for folder in (quantized, written_out):
        engine = make_engine(folder)
        engine.observe_logits(lambda name, at, rows: seen.append(rows.clone()))
        run_all(engine, [list(range(3, 60))], greedy(0, prompt_logprobs=0))
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-4)
    assert make_engine(quantized).info.fingerprint["weights"] != make_engine(written_out).info.fingerprint["weights"]


def save_quantized(source: Path, target: Path) -> tuple[Path, Path]:
    """Two copies of a model whose linears are rounded to 4 bits: as compressed-tensors, and as plain float32."""
    scheme = WeightScheme("int", 4, "group", 32, True, None, "pack-quantized")
    section = QuantizationConfig((ConfigGroup(("Linear",), scheme),), ("lm_head", "re:.*gate$")).to_config()
    packed, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() == 2 and ".layers." in name and not name.endswith(".gate.weight"):
            weight = quantize_weight(tensor, scheme, torch.float32)
            packed |= to_tensors(name.removesuffix(".weight"), weight)
            plain[name] = weight.dequantize()
        else:
            packed[name] = plain[name] = tensor
    config = json.loads((source / "config.json").read_text())
    folders = target / "packed", target / "plain"
    for folder, tensors, extra in zip(folders, (packed, plain), ({"quantization_config": section}, {}), strict=True):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
    return folders


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            "rope type 'dynamic' is not supported",
        ),
    ],
)
def test_what_a_family_does_not_run_is_refused_by_name(tmp_path, make_engine, changes, reason):
    save_tiny_model(tmp_path, "gemma3_text", head_dim=16)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InputError, match=reason):
        make_engine(tmp_path)


def test_a_model_of_more_than_text_is_refused_before_its_weights_are_read(tmp_path, make_engine):
    save_tiny_model(tmp_path, "gemma3_text", head_dim=16)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"'gemma3' is of more than text.*\(gemma3_text\) alone"):
        make_engine(tmp_path)


def test_long_factors_hold_where_longer_texts_than_the_original_context_are_served(tmp_path, make_engine):
    """By the longest text served, from the first token on: transformers with the long factors throughout."""
    save_tiny_model(tmp_path, "phi3", original_max_position_embeddings=64, rope_parameters=LONGROPE)
    prompt = list(range(3, 103))
    expected = Reference(tmp_path).logits(prompt)  # longer than 64: transformers takes the long ones too
    seen = []
    engine = make_engine(tmp_path, max_num_batched_tokens=16, max_num_seqs=4)
    engine.observe_logits(lambda name, at, rows: seen.append(rows.clone()))
    run_all(engine, [prompt], greedy(0, prompt_logprobs=0))
    torch.testing.assert_close(torch.cat(seen), expected[:-1], rtol=1e-4, atol=1e-4)
    assert engine.info.fingerprint["rope"] == "longrope, long factors"
    assert make_engine(tmp_path, max_model_len=64).info.fingerprint["rope"] == "longrope, short factors"


def test_preemption_and_forks_change_no_token_where_windows_alternate(tmp_path, make_engine):
    save_tiny_model(tmp_path, "gemma3_text", head_dim=16, sliding_window=24, sliding_window_pattern=2)
    prompts = [[(7 * position + start) % 500 + 3 for position in range(50)] for start in range(10)]
    expected = [made.token_ids for made in run_all(make_engine(tmp_path), prompts, greedy(60))]
    roomy = make_engine(tmp_path)
    block_bytes = roomy.info.kv_cache_bytes // roomy.info.num_blocks
    tight = make_engine(tmp_path, kv_cache_memory_bytes=34 * block_bytes, max_model_len=128, max_num_batched_tokens=64)
    force_preemption(tight)
    assert [made.token_ids for made in run_all(tight, prompts, greedy(60))] == expected
    assert tight.stats().num_preemptions > 0

    seeded = [greedy(40, seed=seed) for seed in range(3)]
    seeded = [msgspec.structs.replace(params, temperature=1.0) for params in seeded]
    alone = [run_all(make_engine(tmp_path), prompts[:1], params)[0].token_ids for params in seeded]
    forked = make_engine(tmp_path)
    forked.add_request(
        EngineRequest(
            request_id="0", prompt_token_ids=prompts[0], sampling_params=seeded[0], forks=[("1", 1), ("2", 2)]
        )
    )
    made: dict[str, list[int]] = {}
    while forked.has_unfinished_requests:
        for output in forked.step():
            made.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert [made[name] for name in "012"] == alone


def test_window_layers_give_back_blocks_beside_layers_that_keep_them(tmp_path, make_engine):
    save_tiny_model(tmp_path, "gemma2", head_dim=16, sliding_window=16)
    engine = make_engine(tmp_path, max_num_batched_tokens=16, max_num_seqs=1, enable_prefix_caching=False)
    layout = engine.executor.runner.store.layout
    assert [group.spec.window for group in layout.groups] == [16, None]
    engine.add_request(
        EngineRequest(request_id="a", prompt_token_ids=[5] * 200, sampling_params=greedy(40), arrival_time_s=0)
    )
    most = 0
    while engine.has_unfinished_requests:
        engine.step()
        stats = engine.stats()
        most = max(most, stats.num_blocks - stats.num_free_blocks)
    # 15 blocks of the full layer; of the other no more than a window and a chunk need.
    assert 15 < most <= layout.blocks_for(239, 16) < 2 * 15
