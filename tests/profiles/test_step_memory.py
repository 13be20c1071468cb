from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.step_memory import activation_bytes, step_memory

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
MOE = {**LLAMA_8B, "model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts_per_tok": 8}


def activations(config: dict, **more) -> int:
    return activation_bytes(ModelArchitecture.from_config(config), config, 512, 2, **more)


def test_the_wider_of_attention_and_mlp_beside_the_residual_stream():
    assert activations(LLAMA_8B) == 512 * 2 * (2 * 4096 + 3 * 14_336)
    narrow = {**LLAMA_8B, "intermediate_size": 1024}
    assert activations(narrow) == 512 * 2 * (2 * 4096 + 2 * 4096 + 2 * 1024)


def test_a_token_passes_several_experts():
    assert activations({**MOE, "intermediate_size": 4096}) == 512 * 2 * (2 * 4096 + 3 * 8 * 768)


def test_ranks_share_what_is_wide_and_not_the_residual_stream():
    assert activations(LLAMA_8B, ranks=8) == 512 * 2 * (2 * 4096 + 3 * 14_336 // 8)


def test_logits_are_float32_of_each_sequence_that_samples():
    made = step_memory(
        ModelArchitecture.from_config(LLAMA_8B), LLAMA_8B, step_tokens=512, num_sequences=64, float_bytes=2, ranks=4
    )
    assert made.logits_bytes == 64 * 128_256 * 4
    assert made.num_bytes == made.activation_bytes + made.logits_bytes
