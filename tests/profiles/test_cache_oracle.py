"""What the planner says that a decoder keeps, against the cache that transformers' own forward pass fills.

Falcon's newer decoders and latent attention are not here: transformers keeps more than the published engines do (each
KV head once for every query head, K and V in place of the latent).
"""

import pytest

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.kv_spec import KVCacheLayout

NUM_TOKENS = 7
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
WINDOWS = {"head_dim": 16, "sliding_window": 4}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
CASES = {
    "falcon": {**BASE, "num_kv_heads": 4, "multi_query": True, "new_decoder_architecture": False},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 256, "n_positions": 64, "pad_token_id": 0},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 256, "max_seq_len": 64},
    "gemma3n_text": {
        **BASE,
        **WINDOWS,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "laurel_rank": 8,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **BASE,
        **WINDOWS,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 0,
    },
    "mimo_v2_flash": {
        **BASE,
        **EXPERTS,
        "head_dim": 24,
        "v_head_dim": 16,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "sliding_window": 4,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_next": {**BASE, **DELTA, **EXPERTS, "head_dim": 16},
    "qwen3_5_text": {**BASE, **DELTA, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {
        **BASE,
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "num_experts": 2,
    },
    "granitemoehybrid": {
        **BASE,
        **MAMBA_2,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "bamba": {**BASE, **MAMBA_2, "attn_layer_indices": [1, 3]},
    "nemotron_h": {
        **BASE,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 12,
        "n_groups": 2,
        "conv_kernel": 4,
    },
    "zamba2": {
        **BASE,
        "num_key_value_heads": 4,
        "mamba_d_state": 12,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "adapter_rank": 8,
    },
}


def kept_by_transformers(config: dict) -> tuple[int, int, int]:
    """Elements of K and V, of what convolutions look back on, and of recurrent states, after NUM_TOKENS tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.arange(1, NUM_TOKENS + 1)[None], use_cache=True).past_key_values

    def elements(*names: str) -> int:
        found = (getattr(layer, name, None) for layer in cache.layers for name in names)
        tensors = (part for one in found for part in (one.values() if isinstance(one, dict) else (one,)))
        return sum(part.numel() for part in tensors if isinstance(part, torch.Tensor))

    return elements("keys", "values"), elements("conv_states"), elements("recurrent_states")


@pytest.mark.parametrize("model_type", CASES)
def test_the_cache_is_the_one_that_transformers_fills(model_type):
    config = {"model_type": model_type, **CASES[model_type]}
    keys, convolution, recurrent = kept_by_transformers(config)
    architecture = ModelArchitecture.from_config(config)
    # transformers keeps one token less of a window than a query sees: the query brings its own.
    window = {layer.window for layer in architecture.keys} - {None}
    layout = KVCacheLayout.of(architecture, "bf16")
    expected = layout.needed_bytes(NUM_TOKENS) // 2
    if window:
        size = window.pop()
        expected -= sum(group.bytes_per_token // 2 for group in layout.groups if group.spec.window == size)
    assert keys == expected
    assert recurrent == sum(state.parts[-1].num_elements for state in architecture.states)
    # Of a kernel of 4 it keeps 4 positions, of which the newest is of the token that is computed: 3 are the past.
    assert convolution * 3 == 4 * sum(part.num_elements for state in architecture.states for part in state.parts[:-1])
