"""The tensors of a GGUF file under their Hugging Face names, in bf16 or in its own blocks, one piece at a time."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from llmq.profiles.errors import InputError
from llmq.profiles.gguf_blocks import BLOCK_TYPES, part_chunks
from llmq.profiles.gguf_file import StoredTensor
from llmq.profiles.safetensors_file import TensorInfo, tensor_bytes

# GGUF name -> Hugging Face name; `{}` is the layer. Names that are not here are refused, never dropped.
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma has four norms a layer, and its names for them are not what Llama's are for.
_GEMMA3_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Not weights: rope_freqs holds the factors of Llama 3's RoPE scaling, which belong in config.json.
_NOT_WEIGHTS = ("rope_freqs.weight",)

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_CHUNK_ELEMENTS = 1 << 24  # 64 MiB as float32


@dataclass(frozen=True)
class GGUFTensor:
    info: TensorInfo
    source: StoredTensor
    row_order: np.ndarray | None  # rows to take, in order; None: as they lie
    minus: float = 0.0  # what llama.cpp's converter has added to every element

    @property
    def is_linear(self) -> bool:
        return len(self.info.shape) == 2 and self.info.name.endswith(("_proj.weight", "lm_head.weight"))


@dataclass(frozen=True)
class Written:
    """One tensor of a converted folder, and its bytes, a few rows at a time."""

    info: TensorInfo
    chunks: Callable[[], Iterator[bytes]]


def in_bf16(tensor: GGUFTensor) -> list[Written]:
    return [Written(tensor.info, lambda: bf16_chunks(tensor))]


def in_blocks(tensor: GGUFTensor) -> list[Written]:
    """The parts of a linear's blocks as they are, if the runtime multiplies by its type; else `in_bf16`."""
    kind = BLOCK_TYPES.get(tensor.source.type_name) if tensor.is_linear else None
    if kind is None:
        return in_bf16(tensor)
    num_rows, width = tensor.info.shape
    blocks = width // kind.elements
    written = []
    for suffix, part in kind.parts.items():
        shape = (num_rows, blocks * part.per_block)
        name = f"{tensor.info.name.removesuffix('.weight')}.{suffix}"
        info = TensorInfo(name, part.dtype, shape, tensor_bytes(part.dtype, shape), "")
        block_bytes = tensor.source.data.shape[1] // blocks
        chunks = partial(part_chunks, part, tensor.source.data, block_bytes, tensor.row_order)
        written.append(Written(info, chunks))
    return written


def list_tensors(stored: list[StoredTensor], architecture: str, num_heads: int, num_kv_heads: int) -> list[GGUFTensor]:
    """The weights of a file, renamed. Raises InputError for a name that llmq does not know."""
    tensors, unknown = [], []
    for source in stored:
        if source.name in _NOT_WEIGHTS:
            continue
        name = _hugging_face_name(source.name, _GEMMA3_LAYER_NAMES if architecture == "gemma3" else _LAYER_NAMES)
        if name is None:
            unknown.append(source.name)
            continue
        shape = source.shape
        row_order = None
        if architecture == "llama" and ".q_proj." in name:
            row_order = unpermuted_rows(shape[0], num_heads)
        elif architecture == "llama" and ".k_proj." in name:
            row_order = unpermuted_rows(shape[0], num_kv_heads)
        num_bytes = 2 * int(np.prod(shape, dtype=np.int64))
        # Gemma scales by 1 + weight; its files hold the sum.
        minus = 1.0 if architecture == "gemma3" and name.endswith("norm.weight") else 0.0
        tensors.append(GGUFTensor(TensorInfo(name, "BF16", shape, num_bytes, ""), source, row_order, minus))
    if unknown:
        raise InputError(f"the GGUF holds {len(unknown)} tensors that llmq does not know: {', '.join(unknown[:5])}, …")
    return tensors


def _hugging_face_name(name: str, layer_names: dict[str, str]) -> str | None:
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match.group(2) in layer_names:
        return f"model.layers.{match.group(1)}.{layer_names[match.group(2)]}.{match.group(3)}"
    return _MODEL_NAMES.get(name)


def unpermuted_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """Rows of a llama.cpp Q or K matrix in Hugging Face's order.

    llama.cpp rotates neighbours (0, 1), (2, 3), … of a head where Hugging Face rotates halves (0, d/2), (1, d/2 + 1),
    …, so its converter (`LlamaModel.permute`) interleaves the two halves of each head; this is the inverse.
    """
    rows = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return rows.swapaxes(1, 2).reshape(num_rows)


def bf16_chunks(tensor: GGUFTensor) -> Iterator[bytes]:
    """The tensor's little-endian bf16 bytes, a few rows at a time."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    data, kind = tensor.source.data, GGMLQuantizationType[tensor.source.type_name]
    if len(tensor.info.shape) == 1:
        values = dequantize(np.ascontiguousarray(data), kind).reshape(-1) - np.float32(tensor.minus)
        yield to_bf16(values if tensor.row_order is None else values[tensor.row_order]).tobytes()
        return
    num_rows, row_elements = tensor.info.shape
    step = max(1, _CHUNK_ELEMENTS // row_elements)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        rows = data[start:stop] if tensor.row_order is None else data[tensor.row_order[start:stop]]
        try:
            yield to_bf16(dequantize(np.ascontiguousarray(rows), kind)).tobytes()
        except NotImplementedError:
            raise InputError(f"GGUF type {kind.name} ({tensor.source.name}) is not one that llmq can read") from None


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> bf16 as uint16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, np.uint16(0x7FC0), rounded) if nan.any() else rounded
