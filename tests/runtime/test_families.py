"""Every decoder family against transformers on a random model in float32: logits, and greedy tokens under schedules."""

import random

import pytest
import torch
from engine_driver import Reference, greedy, run_all
from tiny_model import save_tiny_model

from llmq.profiles.families import FAMILIES

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0],
}
MOE = {"num_local_experts": 8, "num_experts_per_tok": 2}

CASES = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("mistral", {"sliding_window": 24}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True}),
    ("gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 32, "num_hidden_layers": 3}),
    ("gemma2", {"head_dim": 32, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 5.0}),
    ("gemma2", {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {"head_dim": 32, "sliding_window": 24, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    ("phi3", {}),
    ("phi3", {"sliding_window": 24, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("phi3", {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE}),
    ("phi3", {"tie_word_embeddings": True}),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    ("smollm3", {"num_hidden_layers": 4}),
    ("smollm3", {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True}),
    (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.5,
        },
    ),
    ("starcoder2", {"sliding_window": 24}),
    ("starcoder2", {"use_bias": False, "hidden_act": "gelu"}),
    ("mixtral", {**MOE, "sliding_window": 24}),
    ("qwen3_moe", {**MOE, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    ("qwen3_moe", {**MOE, "moe_intermediate_size": 32, "num_experts_per_tok": 3, "decoder_sparse_step": 2}),
    ("qwen3_moe", {**MOE, "moe_intermediate_size": 32, "mlp_only_layers": [0]}),
]

SCHEDULES = ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 8})


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 512) for _ in range(rng.randint(longest // 2, longest))] for _ in range(count)]


def check_against_transformers(folder, make_engine):
    """Greedy tokens and the logits of every position, prompt and generated, in one piece, in chunks and one by one."""
    given, reference = prompts(4), Reference(folder)
    expected = [reference.greedy(prompt, 24) for prompt in given]
    logits = [reference.logits(prompt + made) for prompt, made in zip(given, expected, strict=True)]
    for changes in SCHEDULES:
        engine, seen = make_engine(folder, **changes), {}
        engine.observe_logits(lambda name, at, rows, seen=seen: seen.setdefault(name, {}).setdefault(at, rows.clone()))
        for made, tokens, wanted in zip(
            run_all(engine, given, greedy(24, prompt_logprobs=0, logprobs=0)), expected, logits, strict=True
        ):
            assert made.token_ids == tokens
            generated = wanted.log_softmax(-1)[-len(tokens) - 1 : -1].max(dim=-1).values
            torch.testing.assert_close(
                torch.tensor([entry.logprob for entry in made.logprobs]), generated, rtol=0, atol=1e-4
            )
        for name, chunks in seen.items():
            made = torch.cat([chunks[start] for start in sorted(chunks)])
            torch.testing.assert_close(made, logits[int(name)][: len(made)], rtol=1e-4, atol=1e-4)
        # Again over a warm prefix cache.
        assert [made.token_ids for made in run_all(engine, given, greedy(24))] == expected


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_logits_and_tokens_equal_transformers(tmp_path, make_engine, model_type, changes):
    check_against_transformers(save_tiny_model(tmp_path, model_type, **changes), make_engine)


def test_every_family_is_compared():
    assert {model_type for model_type, _ in CASES} == set(FAMILIES)
