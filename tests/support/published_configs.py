"""config.json of published models, as far as planning reads it."""

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}

LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
