"""Weights of foreign layouts by their definitions, bit by bit in numpy: oracles for the readers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from llmq.profiles.checkpoint import read_checkpoint


def folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return tensors


def linears_of(tensors: Mapping[str, torch.Tensor], suffix: str) -> list[str]:
    return sorted(name.removesuffix(suffix) for name in tensors if name.endswith(suffix))


def quantization_of(folder: Path) -> dict:
    return read_checkpoint(folder).quantization


def stream(words: torch.Tensor, bits: int) -> np.ndarray:
    """int32 [rows, words] -> [rows, words * 32 / bits]: the numbers of each row's little-endian stream of bits."""
    raw = np.ascontiguousarray(words.numpy()).view(np.uint8)
    each = np.unpackbits(raw, axis=1, bitorder="little")
    each = each[:, : each.shape[1] // bits * bits].reshape(len(raw), -1, bits)
    return each @ (1 << np.arange(bits))


def gptq_weight(tensors: Mapping[str, torch.Tensor], name: str, bits: int, zero_offset: int) -> np.ndarray:
    """[out, in] float64: (u - z) * s with the group of each input channel, as GPTQ's paper has it."""
    u = stream(tensors[f"{name}.qweight"].T, bits)
    zeros = (stream(tensors[f"{name}.qzeros"], bits) + zero_offset) % 2**bits
    group, scales = tensors[f"{name}.g_idx"].numpy(), tensors[f"{name}.scales"].double().numpy()
    return (u - zeros[group].T) * scales[group].T


def awq_weight(tensors: Mapping[str, torch.Tensor], name: str) -> np.ndarray:
    """[out, in] float64, from AWQ's GEMM layout."""

    def unpacked(words: torch.Tensor) -> np.ndarray:
        numbers = np.zeros((words.shape[0], words.shape[1] * 8), dtype=np.int64)
        raw = words.numpy().view(np.uint32)
        for place, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            numbers[:, output::8] = (raw >> (4 * place)) & 15
        return numbers

    scales = tensors[f"{name}.scales"].double().numpy()
    u, zeros = unpacked(tensors[f"{name}.qweight"]), unpacked(tensors[f"{name}.qzeros"])
    group = np.arange(len(u)) // (len(u) // len(zeros))
    return ((u - zeros[group]) * scales[group]).T
