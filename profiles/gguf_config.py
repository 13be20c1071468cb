"""config.json and generation_config.json of a model, from the metadata of its GGUF file."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmq.profiles.errors import InputError

# GGUF architecture -> model_type and class. llama.cpp files Mistral under "llama" too, and computes it the same way.
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}


def model_config(
    fields: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], rope_factors: Any
) -> dict[str, Any]:
    """config.json.

    `fields`: the GGUF's metadata. `tensors`: Hugging Face name -> shape. `rope_factors`: the file's rope_freqs tensor
    or None. Raises InputError for an architecture or a feature that the result could not express.
    """
    arch = fields.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise InputError(f"GGUF architecture {arch!r} is not one that llmq converts ({', '.join(_ARCHITECTURES)})")
    if fields.get(f"{arch}.expert_count"):
        raise InputError(
            f"this GGUF is a mixture of {fields[f'{arch}.expert_count']} experts; llmq converts dense models"
        )

    def field(key: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{key}", default)
        if value is None:
            raise InputError(f"the GGUF lacks {arch}.{key}")
        return value

    model_type, class_name = _ARCHITECTURES[arch]
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = (
        fields.get(f"{arch}.attention.key_length") or fields.get(f"{arch}.rope.dimension_count") or hidden // heads
    )
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(field("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields, arch, rope_factors, head_dim),
        "max_position_embeddings": field("context_length"),
        "vocab_size": tensors["model.embed_tokens.weight"][0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "transformers_version": "4.51.0",  # whose spelling this is; transformers 5 reads it too
        **special_token_ids(fields),
    }
    if model_type == "gemma3_text":
        del config["hidden_act"]
        config |= _gemma3(field, head_dim)
    biased = {name.split(".")[-2] for name in tensors if name.endswith("_proj.bias")}
    if model_type == "qwen2":
        config["use_sliding_window"] = False
    elif biased:
        config["attention_bias"] = bool(biased & {"q_proj", "k_proj", "v_proj", "o_proj"})
        config["mlp_bias"] = bool(biased & {"gate_proj", "up_proj", "down_proj"})
    return config


def _gemma3(field: Callable[..., Any], head_dim: int) -> dict[str, Any]:
    """What llama.cpp's code knows of Gemma 3, and its files do not say."""
    hidden, heads = field("embedding_length"), field("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": field("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        # 256 in every size but 27B, whose queries are scaled by its width over its heads.
        "query_pre_attn_scalar": hidden // heads if field("block_count") == 62 else head_dim,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def special_token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    found = {ours: fields.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """eos_token_id is a list where the file names an end of turn (eot) beside its end of sequence."""
    config: dict[str, Any] = special_token_ids(fields)
    eot = fields.get("tokenizer.ggml.eot_token_id")
    if eot is not None and eot != config.get("eos_token_id"):
        config["eos_token_id"] = [config["eos_token_id"], eot] if "eos_token_id" in config else eot
    return config


def _shortest(value: float) -> float:
    """A float32 as the shortest decimal that reads back as it: 9.999999747378752e-06 was written 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(fields: Mapping[str, Any], arch: str, factors: Any, head_dim: int) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(
            np.asarray(factors, dtype=np.float32), fields.get(f"{arch}.rope.freq_base", 10000.0), head_dim
        )
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields[f"{arch}.rope.scaling.factor"]}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": fields[f"{arch}.rope.scaling.factor"],
            "original_max_position_embeddings": fields[f"{arch}.rope.scaling.original_context_length"],
        }
    raise InputError(f"RoPE scaling {kind!r} of this GGUF is not one that llmq converts (none, linear, yarn, llama3)")


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """The `llama3` parameters whose factors are the file's: 8 for Llama 3.1 and 3.3, 32 for Llama 3.2."""
    for factor in (8.0, 32.0):
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if np.allclose(llama3_rope_factors(scaling, theta, head_dim), factors, rtol=1e-4):
            return scaling
    raise InputError("the rope_freqs tensor of this GGUF is not that of Llama 3.1, 3.2 or 3.3")


def llama3_rope_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """What each RoPE frequency is divided by (Llama 3.1's long-context rule). [head_dim / 2]"""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    # 1 for short waves, `factor` for long ones, blended between: f/s + (1 - s) f / factor, as a divisor.
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)
