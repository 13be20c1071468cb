"""Queries and keys rotated, and keys and values encoded into the blocks of a KVStore: one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmq.runtime.kernels.triton.attention import FORMATS
from llmq.runtime.kernels.triton.launch import Launch
from llmq.runtime.kernels.triton.numbers import bf16_bits_to_fp32, fp32_to_bf16_bits, fp32_to_e4m3, rounded
from llmq.runtime.kv_store import Slots, StoredPart

TOKENS = 16  # of a program


@triton.jit
def _rotated(
    source,
    cos,
    sin,
    positions,
    token,
    is_token,
    stride,
    head,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    """One head of some tokens, float32 [TOKENS, PADDED], rounded to the dtype that it comes in."""
    dim = tl.arange(0, PADDED)
    row = source + token[:, None] * stride + head * DIM
    is_number = is_token[:, None] & (dim < DIM)[None, :]
    x = tl.load(row + dim[None, :], mask=is_number, other=0.0).to(tl.float32)
    if HALF > 0:
        turns = dim < 2 * HALF
        partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
        y = tl.load(row + partner[None, :], mask=is_number & turns[None, :], other=0.0).to(tl.float32)
        position = tl.load(positions + token, mask=is_token, other=0).to(tl.int64)
        angle = position[:, None] * HALF + (dim % HALF)[None, :]
        c = tl.load(cos + angle, mask=is_number & turns[None, :], other=1.0)
        s = tl.load(sin + angle, mask=is_number & turns[None, :], other=0.0)
        x = x * c + tl.where(dim < HALF, -1.0, 1.0)[None, :] * y * s
    return x.to(source.dtype.element_ty).to(tl.float32)


@triton.jit
def _encode(
    x,
    payload,
    scales,
    static_scale,
    block,
    offset,
    is_token,
    head,
    payload_block,
    scale_block,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """`kv_codec`'s encoding of one head of some tokens, to its slots."""
    dim = tl.arange(0, PADDED)
    slot = offset * NUM_HEADS + head
    address = payload + (block * payload_block + slot * DIM)[:, None] + dim[None, :]
    is_number = is_token[:, None] & (dim < DIM)[None, :]
    if FORMAT == 0:
        tl.store(address, x.to(payload.dtype.element_ty), mask=is_number)
    else:
        limit = 127.0 if FORMAT == 1 else 448.0
        if HAS_SCALES:
            peak = tl.max(tl.abs(x), 1)
            peak = tl.maximum(tl.div_rn(peak, limit + tl.zeros_like(peak)), 1e-30)
            bits = fp32_to_bf16_bits(peak)
            tl.store(scales + block * scale_block + slot, bits, mask=is_token)
            x = tl.div_rn(x, bf16_bits_to_fp32(bits)[:, None] + tl.zeros_like(x))
        else:
            x = tl.div_rn(x, static_scale + tl.zeros_like(x))
        if FORMAT == 1:
            q = rounded(tl.minimum(tl.maximum(x, -128.0), 127.0)).to(tl.int8)
        else:
            q = fp32_to_e4m3(x)
        tl.store(address, q, mask=is_number)


@triton.jit
def _rotate_and_write(
    queries,
    keys,
    values,
    cos,
    sin,
    positions,
    blocks,
    offsets,
    rotated_queries,
    key_payload,
    value_payload,
    key_scales,
    value_scales,
    key_static,
    value_static,
    num_tokens,
    query_stride,
    key_stride,
    value_stride,
    key_block,
    value_block,
    key_scale_block,
    value_scale_block,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """One head of TOKENS tokens: a query's, a key's, or a value's.

    Bytes: queries, keys and values read once (their partners in the rotation from the cache), queries and the encoded
    keys and values written once. FLOPs: 3 a rotated number, 1 an encoded one.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    head = tl.program_id(1)
    if head < NUM_HEADS:
        x = _rotated(queries, cos, sin, positions, token, is_token, query_stride, head, DIM_K, PADDED_K, HALF)
        dim = tl.arange(0, PADDED_K)
        address = rotated_queries + (token * NUM_HEADS + head)[:, None] * DIM_K + dim[None, :]
        mask = is_token[:, None] & (dim < DIM_K)[None, :]
        tl.store(address, x.to(rotated_queries.dtype.element_ty), mask=mask)
    else:
        block = tl.load(blocks + token, mask=is_token, other=0).to(tl.int64)
        offset = tl.load(offsets + token, mask=is_token, other=0)
        is_token = is_token & (block >= 0)
        if head < NUM_HEADS + NUM_KV_HEADS:
            kv_head = head - NUM_HEADS
            x = _rotated(keys, cos, sin, positions, token, is_token, key_stride, kv_head, DIM_K, PADDED_K, HALF)
            _encode(
                *(x, key_payload, key_scales, key_static, block, offset, is_token, kv_head),
                *(key_block, key_scale_block, NUM_KV_HEADS, DIM_K, PADDED_K, FORMAT, HAS_SCALES),
            )
        else:
            kv_head = head - NUM_HEADS - NUM_KV_HEADS
            x = _rotated(values, cos, sin, positions, token, is_token, value_stride, kv_head, DIM_V, PADDED_V, 0)
            _encode(
                *(x, value_payload, value_scales, value_static, block, offset, is_token, kv_head),
                *(value_block, value_scale_block, NUM_KV_HEADS, DIM_V, PADDED_V, FORMAT, HAS_SCALES),
            )


def rotate_and_write(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    slots: Slots,
    stored: tuple[StoredPart, StoredPart],
    kv_format: str,
    rotated_queries: Tensor,
) -> list[Launch]:
    """Rotate queries [num_tokens, num_heads, head_dim_k] into `rotated_queries` (contiguous), and write keys, rotated,
    and values [num_tokens, num_kv_heads, head_dim] at their slots of `stored`, as its codec encodes them;
    a negative block: nowhere.

    rotation: float32 tables of cos and sin, [max_positions, 1, rotary_dim / 2], of which each token takes the row of
    its position, for pairs (x[i], x[i + rotary_dim / 2]); None: nothing turns. Tokens may have any stride, what is of
    one token is contiguous.
    """
    num_tokens, num_heads, dim_k = queries.shape
    num_kv_heads, dim_v = values.shape[1:]
    key_part, value_part = stored
    cos, sin = (None, None) if rotation is None else rotation
    has_scales = key_part.scales is not None
    key_static, value_static = (getattr(part.codec, "static_scale", None) or 1.0 for part in stored)
    padded_k, padded_v = (triton.next_power_of_2(dim) for dim in (dim_k, dim_v))
    launch = Launch(
        _rotate_and_write,
        (triton.cdiv(num_tokens, TOKENS), num_heads + 2 * num_kv_heads),
        {
            "queries": queries,
            "keys": keys,
            "values": values,
            "cos": cos,
            "sin": sin,
            "positions": positions,
            "blocks": slots.block,
            "offsets": slots.offset,
            "rotated_queries": rotated_queries,
            "key_payload": key_part.payload,
            "value_payload": value_part.payload,
            "key_scales": key_part.scales.view(torch.int16) if has_scales else None,
            "value_scales": value_part.scales.view(torch.int16) if has_scales else None,
            "key_static": float(key_static),
            "value_static": float(value_static),
            "num_tokens": num_tokens,
            "query_stride": queries.stride(0),
            "key_stride": keys.stride(0),
            "value_stride": values.stride(0),
            "key_block": key_part.payload.stride(0),
            "value_block": value_part.payload.stride(0),
            "key_scale_block": key_part.scales.stride(0) if has_scales else 0,
            "value_scale_block": value_part.scales.stride(0) if has_scales else 0,
        },
        {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "DIM_K": dim_k,
            "DIM_V": dim_v,
            "PADDED_K": padded_k,
            "PADDED_V": padded_v,
            "HALF": 0 if cos is None else cos.shape[-1],
            "TOKENS": TOKENS,
            "FORMAT": FORMATS[kv_format],
            "HAS_SCALES": has_scales,
        },
        num_warps=4,
        num_stages=1,
    )
    return [launch]
