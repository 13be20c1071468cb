"""Decoder families as tiny models: model_type and what its config changes."""

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
    (
        "phi3",  # as Phi-4-mini: some of each head rotates, by factors of its own
        {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                **LONGROPE,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
        },
    ),
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
