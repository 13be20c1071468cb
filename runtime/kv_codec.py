"""How K and V are stored: plain, or rounded to 8 or 4 bits with a scale.

A dynamic scale belongs to one token and one KV head, so that what is stored of a token depends on that token alone,
never on chunking, neighbours, or what was written before (a scale frozen on the first tokens, or on a warm-up, poisons
everything after it). A static one is calibrated and stored in the checkpoint, one for all K and one for all V of a
layer: larger numbers saturate.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmq.profiles.kv_spec import KVDtype
from llmq.quantize.formats.quantized_weight import e4m3_to

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE_DTYPE = torch.bfloat16


class KVCodec(Protocol):
    payload_dtype: torch.dtype
    elements_per_item: int  # numbers in one item of the payload
    has_scales: bool

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [num_tokens, num_kv_heads, head_dim] -> payload [.., head_dim / elements_per_item], scales [.., heads]."""
        ...

    def decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The numbers that attention sees, [..., head_dim] in `dtype`."""
        ...


@dataclass(frozen=True)
class PlainCodec:
    payload_dtype: torch.dtype
    elements_per_item: int = 1
    has_scales: bool = False

    def encode(self, x: Tensor) -> tuple[Tensor, None]:
        return x.to(self.payload_dtype), None

    def decode(self, payload: Tensor, scales: None, dtype: torch.dtype) -> Tensor:
        return payload.to(dtype)


@dataclass(frozen=True)
class IntCodec:
    """Symmetric: q = round(x / s) saturated at -limit - 1 and limit, with s static, or max|x| / limit over a head,
    rounded to bfloat16 before it divides."""

    bits: int
    static_scale: float | None = None
    payload_dtype: torch.dtype = torch.int8
    elements_per_item: int = 1

    @property
    def has_scales(self) -> bool:
        return self.static_scale is None

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        limit = 2 ** (self.bits - 1) - 1
        x = x.float()
        scales = _scales(x, limit) if self.static_scale is None else None
        x = x / (self.static_scale if scales is None else scales.float()[..., None])
        return self._pack(x.round_().clamp_(-limit - 1, limit).to(torch.int8)), scales

    def decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self._unpack(payload).to(dtype) * (self.static_scale if scales is None else scales.to(dtype)[..., None])

    def _pack(self, q: Tensor) -> Tensor:
        return q

    def _unpack(self, payload: Tensor) -> Tensor:
        return payload


@dataclass(frozen=True)
class Int4Codec(IntCodec):
    """Two numbers a byte: the first half of a head in the low nibbles, the second in the high ones."""

    bits: int = 4
    payload_dtype: torch.dtype = torch.uint8
    elements_per_item: int = 2

    def _pack(self, q: Tensor) -> Tensor:
        low, high = (q + 8).to(torch.uint8).chunk(2, dim=-1)
        return low | (high << 4)

    def _unpack(self, payload: Tensor) -> Tensor:
        return torch.cat((payload & 15, payload >> 4), dim=-1).view(torch.int8) - 8


@dataclass(frozen=True)
class Fp8Codec:
    """e4m3: x / s saturated at ±448, with s static, or max|x| / 448 over a head."""

    static_scale: float | None = None
    payload_dtype: torch.dtype = torch.uint8  # float8's bits: torch cannot index float8 on every device
    elements_per_item: int = 1

    @property
    def has_scales(self) -> bool:
        return self.static_scale is None

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x.float()
        scales = _scales(x, 448) if self.static_scale is None else None
        x = x / (self.static_scale if scales is None else scales.float()[..., None])
        # The cast does not saturate: beyond 448 it makes NaN.
        return x.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scales

    def decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        numbers = e4m3_to(payload.view(torch.float8_e4m3fn), dtype)
        return numbers * (self.static_scale if scales is None else scales.to(dtype)[..., None])


def _scales(x: Tensor, limit: int) -> Tensor:
    """[num_tokens, num_kv_heads] in bfloat16; a head of zeros gets a scale that is not zero."""
    return (x.abs().amax(dim=-1) / limit).clamp_(min=1e-30).to(SCALE_DTYPE)


def make_codec(dtype: KVDtype, static_scale: float | None = None) -> KVCodec:
    """The codec of a KV dtype; `static_scale` where the spec has no room for dynamic ones."""
    if dtype.name in TORCH_DTYPES:
        return PlainCodec(TORCH_DTYPES[dtype.name])
    scale = None if dtype.scale_bytes else static_scale
    return {"fp8": Fp8Codec(scale), "int8": IntCodec(8, scale), "int4": Int4Codec()}[dtype.name]
