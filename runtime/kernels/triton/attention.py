"""Paged attention over the blocks of a KVStore, which are read where they lie."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmq.runtime.kernels.triton.launch import Launch, Target
from llmq.runtime.kernels.triton.numbers import bf16_bits_to_fp32, e4m3_to_fp32, int8_to_fp32, tanh
from llmq.runtime.kv_store import StoredPart

MAX_SPLITS = 64
_LOG2_E = 1.4426950408889634
# How a block's numbers are stored, as the kernels name it.
FORMATS = {"fp32": 0, "bf16": 0, "fp16": 0, "int8": 1, "fp8": 2}


@dataclass(frozen=True)
class Tiles:
    """Queries of one launch, in tiles of at most `tile_queries` of one sequence.

    table: int32 [num_tiles, 4]: the sequence's row in the block table, the first query's row in the step, how many
    queries, and the position of the first.
    """

    table: Tensor
    num_tiles: int
    tile_queries: int
    block_rows: int  # rows of the product: queries times the heads that share a KV head, padded
    most_keys: int  # of any tile


@triton.jit
def _attend(
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    block_table,
    tiles,
    output,
    partial,
    partial_lse,
    score_scale,
    softcap,
    value_scale,
    query_stride,
    table_stride,
    key_block,
    value_block,
    key_scale_block,
    value_scale_block,
    output_stride,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One tile of queries with one KV head, over one part of the keys that they see.

    Softmax with a running maximum (Milakov and Gimelshein 2018, arXiv 1805.02867), split over the keys as in
    Flash-Decoding: with NUM_SPLITS > 1 what a part makes, normalized, and the logarithm (of base 2) of its sum go to
    `partial` and `partial_lse`, for `_combine`.

    Bytes: K and V of the keys seen, once for each tile and KV head, and their scales. FLOPs: 2 · rows · keys ·
    (DIM_K + DIM_V), half of the rows × keys of a causal chunk's own corner for nothing.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tiles + tile * 4).to(tl.int64)
    first_row = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 2)
    first_position = tl.load(tiles + tile * 4 + 3)
    row = tl.arange(0, ROWS)
    query = row // GROUP
    is_row = query < count
    head = kv_head * GROUP + row % GROUP
    position = first_position + query
    dim_k = tl.arange(0, PADDED_K)
    dim_v = tl.arange(0, PADDED_V)
    query_address = queries + (first_row + query[:, None]) * query_stride + head[:, None] * DIM_K + dim_k[None, :]
    q = tl.load(query_address, mask=is_row[:, None] & (dim_k[None, :] < DIM_K), other=0.0)

    stop = first_position + count
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(0, first_position - window + 1)
    begin = first_key // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(stop - begin, KEYS), NUM_SPLITS) * KEYS
    begin += split * share
    end = tl.minimum(begin + share, stop)

    highest = tl.full([ROWS], -1e30, tl.float32)  # below every score; finite, so that a row without a key stays 0
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_V], tl.float32)
    for key_start in tl.range(begin, end, KEYS):
        key = key_start + tl.arange(0, KEYS)
        # Nothing else is read: behind a window, and after the last token, blocks hold what may be NaN.
        is_key = (key >= first_key) & (key < end)
        block = tl.load(block_table + sequence * table_stride + key // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        slot = (key % BLOCK_TOKENS) * NUM_KV_HEADS + kv_head
        key_address = keys + (block * key_block + slot * DIM_K)[None, :] + dim_k[:, None]
        value_address = values + (block * value_block + slot * DIM_V)[:, None] + dim_v[None, :]
        k = tl.load(key_address, mask=is_key[None, :] & (dim_k[:, None] < DIM_K), other=0)
        if FORMAT == 2:
            k = e4m3_to_fp32(k)
        elif FORMAT == 1:
            k = int8_to_fp32(k)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * score_scale
        if HAS_SCALES:
            key_scale = tl.load(key_scales + block * key_scale_block + slot, mask=is_key, other=0)
            scores *= bf16_bits_to_fp32(key_scale)[None, :]
        if HAS_SOFTCAP:
            scores = tanh(scores / softcap) * softcap
        seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * 1.4426950408889634, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total = total * decay + tl.sum(weights, 1)
        highest = new_highest
        v = tl.load(value_address, mask=is_key[:, None] & (dim_v[None, :] < DIM_V), other=0)
        if FORMAT == 2:
            v = e4m3_to_fp32(v)
        elif FORMAT == 1:
            v = int8_to_fp32(v)
        mixed *= decay[:, None]
        if HAS_SCALES:
            scale = bf16_bits_to_fp32(tl.load(value_scales + block * value_scale_block + slot, mask=is_key, other=0))
        if HAS_SCALES and ROWS <= 16:
            # The weights are fewer than the values. Relative to the tile's largest scale: a weight times a small one
            # would leave fp16's range.
            largest = tl.maximum(tl.max(scale, 0), 1e-30)
            weights *= (scale / largest)[None, :]
            mixed += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee") * largest
        else:
            if HAS_SCALES:
                v *= scale[:, None]  # a second sum of many rows would not fit in the registers
            mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed, input_precision="ieee")
    mixed = mixed * value_scale / tl.where(total > 0, total, 1.0)[:, None]
    is_number = is_row[:, None] & (dim_v[None, :] < DIM_V)
    if NUM_SPLITS == 1:
        address = output + (first_row + query[:, None]) * output_stride + head[:, None] * DIM_V + dim_v[None, :]
        tl.store(address, mixed.to(output.dtype.element_ty), mask=is_number)
    else:
        place = ((tile * NUM_KV_HEADS + kv_head).to(tl.int64) * NUM_SPLITS + split) * ROWS + row
        lse = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(partial + place[:, None] * DIM_V + dim_v[None, :], mixed, mask=is_number)
        tl.store(partial_lse + place, lse, mask=is_row)


@triton.jit
def _combine(
    partial,
    partial_lse,
    tiles,
    output,
    output_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """One row: the parts that `_attend` made, weighted by their shares of the softmax's sum. Bytes: 4 · NUM_SPLITS ·
    (DIM_V + 1) read, and the row written."""
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row < tl.load(tiles + tile * 4 + 2) * GROUP:
        split, dim = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_V)
        place = ((tile * NUM_KV_HEADS + kv_head).to(tl.int64) * NUM_SPLITS + split) * ROWS + row
        lse = tl.load(partial_lse + place, mask=split < NUM_SPLITS, other=-float("inf"))
        weights = tl.exp2(lse - tl.max(lse, 0))
        is_number = (split < NUM_SPLITS)[:, None] & (lse > -float("inf"))[:, None] & (dim < DIM_V)[None, :]
        parts = tl.load(partial + place[:, None] * DIM_V + dim[None, :], mask=is_number, other=0.0)
        mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
        token = tl.load(tiles + tile * 4 + 1).to(tl.int64) + row // GROUP
        address = output + token * output_stride + (kv_head * GROUP + row % GROUP) * DIM_V + dim
        tl.store(address, mixed.to(output.dtype.element_ty), mask=dim < DIM_V)


def paged_attention(
    queries: Tensor,
    keys: StoredPart,
    values: StoredPart,
    kv_format: str,
    block_table: Tensor,
    tiles: Tiles,
    output: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    target: Target,
) -> list[Launch]:
    """Attention of the queries in `tiles`, causal by their positions, over K and V as a KVStore holds them.

    queries [num_tokens, num_heads, head_dim_k] in fp16, bf16 or fp32, heads and numbers contiguous; output
    [num_tokens, num_heads, head_dim_v], of which the tiles' rows are written and no others.
    """
    num_heads, dim_k = queries.shape[1:]
    block_tokens, num_kv_heads = keys.payload.shape[1:3]
    dim_v, group = output.shape[2], num_heads // num_kv_heads
    padded_k, padded_v = (max(16, triton.next_power_of_2(dim)) for dim in (dim_k, dim_v))
    splits = _num_splits(tiles, num_kv_heads, target)
    key_tile, num_warps, num_stages = _shape(tiles.block_rows, padded_k, padded_v, queries.dtype, target)
    partial = partial_lse = None
    if splits > 1:
        places = tiles.num_tiles * num_kv_heads * splits * tiles.block_rows
        partial = torch.empty(places, dim_v, dtype=torch.float32, device=queries.device)
        partial_lse = torch.empty(places, dtype=torch.float32, device=queries.device)
    key_static, value_static = (getattr(part.codec, "static_scale", None) or 1.0 for part in (keys, values))
    has_scales = keys.scales is not None
    heads = {"NUM_KV_HEADS": num_kv_heads, "GROUP": group, "DIM_V": dim_v, "PADDED_V": padded_v}
    attend = Launch(
        _attend,
        (tiles.num_tiles, num_kv_heads, splits),
        {
            "queries": queries,
            "keys": keys.payload,
            "values": values.payload,
            "key_scales": keys.scales.view(torch.int16) if has_scales else None,
            "value_scales": values.scales.view(torch.int16) if has_scales else None,
            "block_table": block_table,
            "tiles": tiles.table,
            "output": output,
            "partial": partial,
            "partial_lse": partial_lse,
            "score_scale": float(scale * key_static),
            "softcap": float(softcap or 0.0),
            "value_scale": float(value_static),
            "query_stride": queries.stride(0),
            "table_stride": block_table.stride(0),
            "key_block": keys.payload.stride(0),
            "value_block": values.payload.stride(0),
            "key_scale_block": keys.scales.stride(0) if has_scales else 0,
            "value_scale_block": values.scales.stride(0) if has_scales else 0,
            "output_stride": output.stride(0),
            "window": window or 0,
        },
        heads
        | {
            "DIM_K": dim_k,
            "PADDED_K": padded_k,
            "BLOCK_TOKENS": block_tokens,
            "ROWS": tiles.block_rows,
            "KEYS": key_tile,
            "NUM_SPLITS": splits,
            "FORMAT": FORMATS[kv_format],
            "HAS_SCALES": has_scales,
            "HAS_SOFTCAP": softcap is not None,
            "HAS_WINDOW": window is not None,
        },
        num_warps,
        num_stages,
    )
    if splits == 1:
        return [attend]
    combine = Launch(
        _combine,
        (tiles.num_tiles, num_kv_heads, min(tiles.block_rows, tiles.tile_queries * group)),
        {
            "partial": partial,
            "partial_lse": partial_lse,
            "tiles": tiles.table,
            "output": output,
            "output_stride": output.stride(0),
        },
        heads | {"ROWS": tiles.block_rows, "NUM_SPLITS": splits, "PADDED_SPLITS": triton.next_power_of_2(splits)},
    )
    return [attend, combine]


def _num_splits(tiles: Tiles, num_kv_heads: int, target: Target) -> int:
    """Parts of the keys: as many as give each processor two programs, and each part at least 256 keys."""
    wanted = -(-2 * target.num_processors // max(1, tiles.num_tiles * num_kv_heads))
    return max(1, min(MAX_SPLITS, wanted, tiles.most_keys // 256))


def _shape(rows: int, padded_k: int, padded_v: int, dtype: torch.dtype, target: Target) -> tuple[int, int, int]:
    """(keys of a tile, warps, stages): what an architecture's registers and shared memory hold without spilling."""
    wide = max(padded_k, padded_v) > 128 or dtype == torch.float32
    if rows <= 16:
        return (32, 8, 2) if wide else (64, 4, 3)
    if target.has_large_tiles and not wide:
        return 64, 8, 3 if target.is_hopper else 2
    # ptxas holds sm_89 to 168 registers with 4 warps and to 128 with 8: converted K and V spill in one or the other.
    is_small_on_ada = target.arch == 89 and max(padded_k, padded_v) <= 64
    many_warps = target.backend == "cuda" and (wide or rows > 64 or is_small_on_ada)
    return 32, 8 if many_warps else 4, 2
