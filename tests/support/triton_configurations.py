"""Launches of real models' shapes on tensors that are not there, as the runtime plans them for an architecture."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.attention.triton import plan_tiles
from llmq.runtime.kernels.triton import row_kernels
from llmq.runtime.kernels.triton.attention import paged_attention
from llmq.runtime.kernels.triton.kv_write import rotate_and_write
from llmq.runtime.kernels.triton.launch import Launch, Target
from llmq.runtime.kernels.triton.sampling import sample
from llmq.runtime.kernels.triton.weight_only import (
    FP8,
    INT4,
    INT8,
    ChunkedWeight,
    expert_tiles,
    multiply,
    multiply_grouped,
)
from llmq.runtime.kv_store import KVStore, Slots

META = torch.device("meta")
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Configuration:
    name: str
    launch: Launch
    many_rows: bool = False  # enough for Hopper's warpgroup products


def representative(target: Target) -> Iterator[Configuration]:
    """What a model of 8B runs most, and the widest of each kernel: for every run of the suite."""
    yield from _attention(target, "bf16", BF16, 128, 1)
    yield from _attention(target, "int8", BF16, 128, 1)
    yield from _attention(target, "bf16", BF16, 128, 512)
    yield from _attention(target, "fp8", BF16, 128, 512)
    yield from _attention(target, "int8", BF16, 256, 512, 4096, 30.0)
    yield from _kv_write("int8", BF16, 128)
    yield from _products(target, INT4, BF16, 1, True)
    yield from _products(target, INT4, BF16, 512, True)
    yield from _products(target, INT8, BF16, 64, False)
    yield from _products(target, FP8, BF16, 512, False)
    yield _experts(target, BF16, 64)
    yield from _rows(BF16)
    yield _sampling()


def _every_attention(target: Target, kind: str) -> Iterator[Configuration]:
    for dtype, dim in itertools.product((BF16, FP16), (64, 128, 256)):
        name = kind if kind != "own" else {BF16: "bf16", FP16: "fp16"}[dtype]
        yield from _kv_write(name, dtype, dim)
        for queries, bounds in itertools.product((1, 512), ((None, None), (4096, 30.0))):
            yield from _attention(target, name, dtype, dim, queries, *bounds)


def _every_product(target: Target, form: int) -> Iterator[Configuration]:
    for dtype, rows, has_zeros in itertools.product((BF16, FP16), (1, 64, 512), (False, True)):
        yield from _products(target, form, dtype, rows, has_zeros)


def _every_other(target: Target) -> Iterator[Configuration]:
    for dtype, rows in itertools.product((BF16, FP16), (16, 64, 128)):
        yield _experts(target, dtype, rows)
    yield from _rows(BF16)
    yield from _rows(FP16)
    yield _sampling()


# All that the runtime plans, in parts of some minutes each.
EVERY = {
    **{f"attention over {kind} blocks": partial(_every_attention, kind=kind) for kind in ("own", "int8", "fp8")},
    "int4 weights": partial(_every_product, form=INT4),
    "int8 weights": partial(_every_product, form=INT8),
    "fp8 weights": partial(_every_product, form=FP8),
    "experts, rows, sampling": _every_other,
}


def _meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def _attention(
    target: Target,
    name: str,
    dtype: torch.dtype,
    dim: int,
    queries: int,
    window: int | None = None,
    softcap: float | None = None,
) -> Iterator[Configuration]:
    """32 heads, 8 KV heads, two sequences of 8,192 tokens; 8 bits with a scale a token."""
    scale_bytes = 2 if name in ("int8", "fp8") else 0
    spec = KVCacheSpec(8, dim, dim, replace(KV_DTYPES[name], scale_bytes=scale_bytes), window)
    store = KVStore(KVCacheLayout((KVCacheGroup(spec, (0,), 16),)), 1024, META)
    table = _meta(2, 512, dtype=torch.int64)
    metadata = AttentionMetadata([0, queries, 2 * queries], [8192] * 2, table, Slots(table, table), 16, window)
    q = _meta(2 * queries, 32, dim, dtype=dtype)
    (tiles,) = plan_tiles(metadata, 4, target, META)
    launches = paged_attention(
        *(q, *store.parts(0), name, table, tiles, torch.empty_like(q)),
        *(dim**-0.5, softcap, window, target),
    )
    what = f"{name} blocks, {dim}, {queries} queries of {dtype}, window {window}, softcap {softcap}"
    yield Configuration(f"attention over {what}", launches[0], many_rows=queries > 16)
    for combine in launches[1:]:
        yield Configuration(f"combine {what}", combine)


def _kv_write(name: str, dtype: torch.dtype, dim: int) -> Iterator[Configuration]:
    spec = KVCacheSpec(8, dim, dim, replace(KV_DTYPES[name], scale_bytes=2 if name in ("int8", "fp8") else 0))
    store = KVStore(KVCacheLayout((KVCacheGroup(spec, (0,), 16),)), 1024, META)
    q, k, v = _meta(512, 48 * dim, dtype=dtype).split([32 * dim, 8 * dim, 8 * dim], dim=1)
    q, k, v = (x.unflatten(1, (-1, dim)) for x in (q, k, v))
    tables = tuple(_meta(8192, 1, dim // 2, dtype=torch.float32) for _ in range(2))
    slots = Slots(*(_meta(512, dtype=torch.int64) for _ in range(2)))
    positions = _meta(512, dtype=torch.int64)
    rotated = _meta(512, 32, dim, dtype=dtype)
    for launch in rotate_and_write(q, k, v, tables, positions, slots, store.parts(0), name, rotated):
        yield Configuration(f"rotate and write {name} blocks, {dim}, {dtype}", launch)


def _weight(form: int, dtype: torch.dtype, has_zeros: bool, experts: int = 1) -> ChunkedWeight:
    out_features, in_features = 4096, 4096
    shape = (experts, in_features // 64, out_features)
    numbers = _meta(*shape, 8, dtype=torch.int32) if form == INT4 else _meta(*shape, 64, dtype=torch.int8)
    if form == FP8:
        numbers = _meta(*shape, 64, dtype=torch.uint8)
    group = in_features if form == FP8 else 128
    scales = _meta(experts, in_features // group, out_features, dtype=torch.float32 if form == FP8 else dtype)
    zeros = _meta(*scales.shape, dtype=torch.int8) if has_zeros and form != FP8 else None
    return ChunkedWeight(numbers, scales, zeros, (out_features, in_features), 64, group, form)


def _products(target: Target, form: int, dtype: torch.dtype, rows: int, has_zeros: bool) -> Iterator[Configuration]:
    weight = _weight(form, dtype, has_zeros)
    x, y = _meta(rows, 4096, dtype=dtype), _meta(rows, 4096, dtype=dtype)
    name = {INT4: "int4", INT8: "int8", FP8: "fp8"}[form]
    launches = multiply(x, weight, None, y, target)
    yield Configuration(f"{name} weight, zeros {has_zeros}, {rows} rows of {dtype}", launches[0], many_rows=rows > 64)
    for total in launches[1:]:
        yield Configuration(f"sum of parts, {rows} rows of {dtype}", total)


def _experts(target: Target, dtype: torch.dtype, rows: int) -> Configuration:
    x, y = _meta(1024, 4096, dtype=dtype), _meta(1024, 4096, dtype=dtype)
    tiles = expert_tiles(torch.zeros(8, dtype=torch.int64), 1024, rows).to(META)
    launch = multiply_grouped(x, _weight(INT4, dtype, True, 8), tiles, rows, y, target)
    return Configuration(f"int4 experts, {rows} rows of {dtype}", launch, many_rows=rows > 64)


def _rows(dtype: torch.dtype) -> Iterator[Configuration]:
    x = _meta(64, 8192, dtype=dtype)
    norm = row_kernels.rms_norm(x, _meta(8192, dtype=dtype), 1e-5, _meta(64, 8192, dtype=dtype), x, 1.0, x)
    yield Configuration(f"rms_norm of {dtype}", norm)
    for name in ("silu", "gelu", "gelu_new"):
        launch = row_kernels.gate(_meta(64, 28672, dtype=dtype), name, _meta(64, 14336, dtype=dtype))
        yield Configuration(f"{name} gate of {dtype}", launch)
    wide = _meta(64, 28672, dtype=dtype)
    for q in (torch.int8, torch.uint8):
        launch = row_kernels.round_rows(wide, _meta(64, 28672, dtype=q), _meta(64, dtype=torch.float32))
        yield Configuration(f"round {dtype} to {q}", launch)


def _sampling() -> Configuration:
    numbers = [_meta(64, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.float32, torch.float32)]
    ids = [_meta(64, dtype=torch.int64) for _ in range(3)]
    logits = _meta(64, 128256, dtype=torch.float32)
    return Configuration("sampling", sample(logits, *numbers, *ids, _meta(64, dtype=torch.float32)))
