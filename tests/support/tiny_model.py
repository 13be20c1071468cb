"""A random model of any family that transformers can build, small enough for a test."""

from pathlib import Path

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def save_tiny_model(folder: Path, model_type: str, dtype: str = "float32", **changes: object) -> Path:
    """Save one with every parameter random (seed 0), norms and biases too, so that none can be left out unseen."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**TINY, **changes}))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            # Around what it starts from: ones for most norms, zeros for biases and for Gemma's norms.
            parameter.data += 0.2 * torch.randn_like(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
