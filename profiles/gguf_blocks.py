"""GGUF's blocks of quantized numbers as the plain parts that they are made of: numbers in order, scales, offsets.

A block interleaves its scales and its numbers, and its numbers with each other (ggml-common.h; gguf-py's quants.py).
The parts are those of the runtime's one quantized weight, so that a file is served as it is stored, every number:

    weight[o, i] = (u[o, i] - 2**(bits-1)) * scale          Q4_0, Q5_0, Q8_0, Q3_K, Q6_K
    weight[o, i] = u[o, i] * scale + offset                 Q4_1, Q5_1, Q2_K, Q4_K, Q5_K

where a K block's scale (and offset) is a small whole number of each group times one float16 of the block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

Blocks = np.ndarray  # uint8 [num_blocks, bytes of a block]
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Part:
    """One tensor of a linear: `per_block` numbers of a safetensors dtype for each block, read by `read`."""

    dtype: str
    per_block: int
    read: Callable[[Blocks], np.ndarray]  # [num_blocks, per_block]


@dataclass(frozen=True)
class BlockType:
    bits: int
    elements: int  # of a block
    numbers: Callable[[Blocks], np.ndarray]  # u, uint8 [num_blocks, elements]; of 8 bits the signed numbers, int8
    scales: dict[str, Part]  # by the last part of the tensor's name

    @property
    def parts(self) -> dict[str, Part]:
        """All tensors; the numbers as int32 words, or int8 as they are."""
        if self.bits == 8:
            return {"weight": Part("I8", self.elements, self.numbers), **self.scales}
        num_words = self.elements * self.bits // 32
        words = Part("I32", num_words, lambda blocks: pack_stream(self.numbers(blocks), self.bits))
        return {"weight_packed": words, **self.scales}


def part_chunks(part: Part, data: np.ndarray, block_bytes: int, row_order: np.ndarray | None) -> Iterator[bytes]:
    """The bytes of one part of a tensor, `data` [rows, bytes], a few rows at a time and in `row_order`."""
    step = max(1, _CHUNK_ELEMENTS // data.shape[1])
    for start in range(0, len(data), step):
        rows = data[start : start + step] if row_order is None else data[row_order[start : start + step]]
        yield np.ascontiguousarray(part.read(np.ascontiguousarray(rows).reshape(-1, block_bytes))).tobytes()


def pack_stream(u: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [n, 32 k] in [0, 2**bits) -> int32 [n, k * bits]: each row a little-endian stream of bits."""
    eights = u.reshape(len(u), -1, 8).astype(np.uint16)
    stream = np.zeros((*eights.shape[:2], bits + 1), dtype=np.uint8)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        moved = eights[:, :, place] << shift
        stream[:, :, byte] |= moved.astype(np.uint8)
        stream[:, :, byte + 1] |= (moved >> 8).astype(np.uint8)
    return np.ascontiguousarray(stream[:, :, :bits]).reshape(len(u), -1).view(np.int32)


def _float16(at: int, sign: int = 1) -> Part:
    def read(blocks: Blocks) -> np.ndarray:
        return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16) * np.float16(sign)

    return Part("F16", 1, read)


def _half_bytes(at: int) -> Callable[[Blocks], np.ndarray]:
    """16 bytes: the low halves are numbers 0 to 15, the high ones 16 to 31."""
    return lambda blocks: np.concatenate([blocks[:, at : at + 16] & 15, blocks[:, at : at + 16] >> 4], axis=1)


def _fifth_bits(at: int) -> Callable[[Blocks], np.ndarray]:
    """Four bytes of the numbers' fifth bits, then 16 bytes of halves."""
    low = _half_bytes(at + 4)
    return lambda blocks: low(blocks) | np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _shifted(part: np.ndarray, width: int, shifts: tuple[int, ...], mask: int) -> np.ndarray:
    """Bytes [n, m] in runs of `width`, each run once a shift, masked: [n, m * len(shifts)]"""
    runs = part.reshape(len(part), -1, 1, width) >> np.array(shifts, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (runs & np.uint8(mask)).reshape(len(part), -1)


def _scales_of_8(high: int) -> Callable[[Blocks], np.ndarray]:
    """The 6-bit scales (high = 0) or minima (1) of the 8 groups of a Q4_K or Q5_K block: 12 bytes from the fifth on."""

    def read(blocks: Blocks) -> np.ndarray:
        first = blocks[:, 4 + 4 * high : 8 + 4 * high]
        rest = blocks[:, 12:16] >> (4 * high) & 15
        return np.concatenate([first & 63, rest | (first >> 2 & 48)], axis=1)

    return read


def _scales_of_16(blocks: Blocks) -> np.ndarray:
    """The 6-bit scales, less 32, of the 16 groups of a Q3_K block: 12 bytes from the 97th on."""
    low = _shifted(blocks[:, 96:104], 8, (0, 4), 15)
    high = _shifted(blocks[:, 104:108], 4, (0, 2, 4, 6), 3)
    return (low | high << 4).astype(np.int8) - np.int8(32)


def _q3_k(blocks: Blocks) -> np.ndarray:
    return _shifted(blocks[:, 32:96], 32, (0, 2, 4, 6), 3) | _shifted(blocks[:, :32], 32, tuple(range(8)), 1) << 2


def _q5_k(blocks: Blocks) -> np.ndarray:
    return _shifted(blocks[:, 48:], 32, (0, 4), 15) | _shifted(blocks[:, 16:48], 32, tuple(range(8)), 1) << 4


def _q6_k(blocks: Blocks) -> np.ndarray:
    return _shifted(blocks[:, :128], 64, (0, 4), 15) | _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << 4


_Q45_K = {
    "weight_scale": Part("U8", 8, _scales_of_8(0)),
    "weight_scale_outer": _float16(0),
    "weight_offset": Part("U8", 8, _scales_of_8(1)),
    "weight_offset_outer": _float16(2, -1),  # the minimum is subtracted
}

BLOCK_TYPES = {
    "Q4_0": BlockType(4, 32, _half_bytes(2), {"weight_scale": _float16(0)}),
    "Q4_1": BlockType(4, 32, _half_bytes(4), {"weight_scale": _float16(0), "weight_offset": _float16(2)}),
    "Q5_0": BlockType(5, 32, _fifth_bits(2), {"weight_scale": _float16(0)}),
    "Q5_1": BlockType(5, 32, _fifth_bits(4), {"weight_scale": _float16(0), "weight_offset": _float16(2)}),
    "Q8_0": BlockType(8, 32, lambda blocks: blocks[:, 2:].view(np.int8), {"weight_scale": _float16(0)}),
    "Q2_K": BlockType(
        2,
        256,
        lambda blocks: _shifted(blocks[:, 16:80], 32, (0, 2, 4, 6), 3),
        {
            "weight_scale": Part("U8", 16, lambda blocks: blocks[:, :16] & 15),
            "weight_scale_outer": _float16(80),
            "weight_offset": Part("U8", 16, lambda blocks: blocks[:, :16] >> 4),
            "weight_offset_outer": _float16(82, -1),
        },
    ),
    "Q3_K": BlockType(
        3, 256, _q3_k, {"weight_scale": Part("I8", 16, _scales_of_16), "weight_scale_outer": _float16(108)}
    ),
    "Q4_K": BlockType(4, 256, lambda blocks: _shifted(blocks[:, 16:], 32, (0, 4), 15), _Q45_K),
    "Q5_K": BlockType(5, 256, _q5_k, _Q45_K),
    "Q6_K": BlockType(
        6,
        256,
        _q6_k,
        {
            "weight_scale": Part("I8", 16, lambda blocks: blocks[:, 192:208].view(np.int8)),
            "weight_scale_outer": _float16(208),
        },
    ),
}
