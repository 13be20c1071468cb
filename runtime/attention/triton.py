"""Paged attention by Triton kernels: `runtime/kernels/triton/attention.py`."""

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.kernels import interpreted
from llmq.runtime.kernels.triton.attention import FORMATS, Tiles, paged_attention
from llmq.runtime.kernels.triton.launch import Target
from llmq.runtime.kv_store import KVStore

DTYPES = (torch.bfloat16, torch.float16)  # and float32 in the interpreter; on a GPU torch serves it
MAX_HEAD_DIM = 256
FEW_ROWS, MANY_ROWS = 16, (64, 128)  # of a tile's product: of decoding, and of a chunk (the more on Hopper)


class StepTiles(Protocol):
    """What the kernels read of a step, of one group of layers."""

    metadata: AttentionMetadata
    block_table: Tensor
    target: Target

    def tiles(self, group: int) -> list[Tiles]:
        """Its queries, for layers in which `group` heads share a KV head."""
        ...


@dataclass(frozen=True)
class PreparedStep:
    """A step of one group, and its tiles for each number of heads that share a KV head, made when a layer asks."""

    metadata: AttentionMetadata
    block_table: Tensor
    target: Target

    @functools.cached_property
    def _tiles(self) -> dict[int, list[Tiles]]:
        return {}

    def tiles(self, group: int) -> list[Tiles]:
        if group not in self._tiles:
            self._tiles[group] = plan_tiles(self.metadata, group, self.target, self.block_table.device)
        return self._tiles[group]


class TritonAttention:
    name = "triton"
    reads_unwritten = True

    @staticmethod
    def runs(store: KVStore, dtype: torch.dtype) -> bool:
        """Whether the kernels serve queries of `dtype` over this store. Int4 blocks are left to torch."""
        specs = [group.spec for group in store.layout.groups]
        return (
            (store.device.type == "cuda" or interpreted())
            and (dtype in DTYPES or interpreted())
            and all(
                spec.dtype.name in FORMATS and max(spec.head_dim_k, spec.head_dim_v) <= MAX_HEAD_DIM for spec in specs
            )
        )

    def prepare(self, metadata: AttentionMetadata) -> PreparedStep:
        return PreparedStep(metadata, metadata.block_table, Target.of(metadata.block_table.device))

    def __call__(
        self,
        queries: Tensor,
        layer: int,
        store: KVStore,
        prepared: StepTiles,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        spec, (keys, values) = store.spec(layer), store.parts(layer)
        num_tokens, num_heads, head_dim = queries.shape
        if queries.stride()[1:] != (head_dim, 1):
            queries = queries.contiguous()
        output = queries.new_empty(num_tokens, num_heads, spec.head_dim_v)
        for tiles in prepared.tiles(num_heads // spec.num_kv_heads):
            launches = paged_attention(
                queries,
                keys,
                values,
                spec.dtype.name,
                prepared.block_table,
                tiles,
                output,
                scale,
                softcap,
                prepared.metadata.window,
                prepared.target,
            )
            for launch in launches:
                launch.run()
        return output


def plan_tiles(metadata: AttentionMetadata, group: int, target: Target, device: torch.device) -> list[Tiles]:
    """Sequences of few queries in tiles of few rows, the chunks of the others in tiles of many."""
    few = max(FEW_ROWS, power_of_two(group))
    many = max(MANY_ROWS[target.has_large_tiles], few)
    rows_of: dict[int, list[int]] = {few: [], many: []}
    for sequence in range(len(metadata.seq_lens)):
        rows_of[few if metadata.num_queries(sequence) * group <= few else many].append(sequence)
    return [
        _tiles_of(metadata, sequences, rows // group, rows, device) for rows, sequences in rows_of.items() if sequences
    ]


def _tiles_of(
    metadata: AttentionMetadata, sequences: list[int], tile_queries: int, rows: int, device: torch.device
) -> Tiles:
    table, most_keys = [], 1
    for sequence in sequences:
        begin, count = metadata.query_start_loc[sequence], metadata.num_queries(sequence)
        before = metadata.seq_lens[sequence] - count
        for first in range(0, count, tile_queries):
            queries = min(tile_queries, count - first)
            table.append((sequence, begin + first, queries, before + first))
            seen = before + first + queries
            most_keys = max(most_keys, seen if metadata.window is None else min(seen, metadata.window + queries))
    on_host = torch.tensor(table, dtype=torch.int32)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return Tiles(on_host.to(device, non_blocking=True), len(table), tile_queries, rows, most_keys)


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
