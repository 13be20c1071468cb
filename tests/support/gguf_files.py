"""GGUF files of random blocks of any type, and what gguf-py says is in them."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np

# Where a block's float16 numbers lie: random bytes there would be NaN or huge.
_FLOATS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
TYPES = tuple(_FLOATS)
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_blocks(kind: str, rows: int, width: int, generator: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes of a row] of valid blocks, whose weights are a few hundredths."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows * width // elements, num_bytes), dtype=np.uint8)
    # A K block multiplies by 6 bits more (8 in a Q6_K).
    size = {"Q6_K": 2.0**-15, "Q8_0": 2.0**-11}.get(kind, 2.0**-12 if kind.endswith("K") else 2.0**-7)
    for at in _FLOATS[kind]:
        values = (generator.random(len(blocks)) + 0.5) * size * (1 if at == _FLOATS[kind][0] else 4)
        values *= -1 if kind in ("Q4_1", "Q5_1") and at else 1  # about the middle of the numbers
        blocks[:, at : at + 2] = values.astype(np.float16).reshape(-1, 1).view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantized(blocks: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def write_llama(path: Path, types: dict[str, str], *, tied: bool = False, layers: int = 2) -> dict[str, np.ndarray]:
    """A random Llama (hidden 256, 4 heads, 2 KV heads, 512 words); the float32 weights under Hugging Face's names.

    types: GGUF type by the last part of a linear's name ("q_proj", "lm_head"), "" for all others.
    """
    hidden, ffn, heads, kv_heads = 256, 512, 4, 2
    kv = hidden * kv_heads // heads
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["t", "0", *(f"t{index}" for index in range(510))])
    writer.add_token_types([1] * 512)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    held: dict[str, np.ndarray] = {}

    def add_float(name: str, ours: str, values: np.ndarray) -> None:
        # Numbers that bf16 holds, which is what becomes of them.
        held[ours] = (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        writer.add_tensor(name, held[ours])

    def add_linear(name: str, ours: str, rows: int, width: int) -> None:
        kind = types.get(ours.removesuffix(".weight").rpartition(".")[2], types[""])
        blocks = random_blocks(kind, rows, width, generator)
        held[ours] = dequantized(blocks, kind)
        if "attn_q" in name or "attn_k" in name:  # as llama.cpp's converter permutes them
            n = heads if "attn_q" in name else kv_heads
            blocks = blocks.reshape(n, 2, rows // n // 2, -1).swapaxes(1, 2).reshape(rows, -1)
        writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=gguf.GGMLQuantizationType[kind])

    add_float("token_embd.weight", "model.embed_tokens.weight", generator.standard_normal((512, hidden)))
    shapes = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "down_proj": (hidden, ffn)}
    shapes |= {"o_proj": (hidden, hidden), "gate_proj": (ffn, hidden), "up_proj": (ffn, hidden)}
    for layer in range(layers):
        add_float(f"blk.{layer}.attn_norm.weight", f"model.layers.{layer}.input_layernorm.weight", np.ones(hidden))
        post = f"model.layers.{layer}.post_attention_layernorm.weight"
        add_float(f"blk.{layer}.ffn_norm.weight", post, np.ones(hidden))
        for ours, theirs in _LAYER.items():
            shape = shapes[ours.rpartition(".")[2]]
            add_linear(f"blk.{layer}.{theirs}.weight", f"model.layers.{layer}.{ours}.weight", *shape)
    add_float("output_norm.weight", "model.norm.weight", np.ones(hidden))
    if not tied:
        add_linear("output.weight", "lm_head.weight", 512, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def float32_folder(folder: Path, weights: dict[str, np.ndarray], converted: Path) -> Path:
    """A Hugging Face folder of `weights` in float32, with the config of `converted`."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    for path in converted.glob("*.json"):
        shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    save_file({name: torch.from_numpy(values.copy()) for name, values in weights.items()}, folder / "model.safetensors")
    return folder
