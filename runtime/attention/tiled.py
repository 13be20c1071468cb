"""Paged attention in tiles of fixed shape: what a query gets does not depend, in any bit, on what else a step computes.

A fused kernel picks its order of summation by the shapes it is called with, which change with the batch, the chunk and
the padding. Here every product has one shape, and keys are summed in tiles that begin at multiples of KEY_TILE of the
sequence, whoever asks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.kv_store import KVStore

QUERY_TILE = 16  # rows of one product: a query's heads that share a KV head, and further queries
KEY_TILE = 128
_NO_MAXIMUM = -1e30  # below every score; finite, so that a tile without a visible key changes nothing


@dataclass(frozen=True)
class _Tiles:
    """Row tiles of all sequences, and for each key tile who reads it."""

    tokens: Tensor  # [num_tiles, queries_per_tile]: rows of the step; a padding row repeats the first
    is_padding: Tensor  # like tokens
    positions: Tensor  # like tokens: of the queries in their sequences
    first_key_tile: int
    active: list[Tensor]  # for each key tile from the first on: the row tiles that see something of it
    blocks: list[Tensor]  # for each key tile: [len(active), blocks that cover it]
    starts: list[Tensor]  # for each key tile: [len(active)], where in the first block it begins


class TiledAttention:
    """Softmax over key tiles with a running maximum (Milakov and Gimelshein 2018, arXiv 1805.02867), in float32."""

    name = "tiled, batch-invariant"
    reads_unwritten = True

    def __init__(self, group_size: int) -> None:
        self.queries_per_tile = max(1, QUERY_TILE // group_size)

    def prepare(self, metadata: AttentionMetadata) -> tuple[AttentionMetadata, _Tiles]:
        return metadata, _plan_tiles(metadata, self.queries_per_tile)

    def __call__(
        self,
        queries: Tensor,
        layer: int,
        store: KVStore,
        prepared: tuple[AttentionMetadata, _Tiles],
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        metadata, tiles = prepared
        spec = store.spec(layer)
        num_heads, num_kv_heads = queries.shape[1], spec.num_kv_heads
        group_size = num_heads // num_kv_heads
        num_tiles, per_tile = tiles.tokens.shape
        # [num_tiles, num_kv_heads, rows, head_dim]: the heads of a group side by side
        rows = queries[tiles.tokens].float().unflatten(2, (num_kv_heads, group_size))
        rows = rows.permute(0, 2, 1, 3, 4).flatten(2, 3)
        shape = (num_tiles, num_kv_heads, per_tile * group_size)
        maximum = rows.new_full(shape, _NO_MAXIMUM)
        total = rows.new_zeros(shape)
        mixed = rows.new_zeros(*shape, spec.head_dim_v)
        positions = tiles.positions.repeat_interleave(group_size, dim=1)  # [num_tiles, rows]
        for index, active in enumerate(tiles.active):
            first = (tiles.first_key_tile + index) * KEY_TILE
            keys, values = (
                _cut(part, tiles.starts[index]).transpose(1, 2)  # [active, num_kv_heads, KEY_TILE, head_dim]
                for part in store.read(layer, tiles.blocks[index], torch.float32)
            )
            scores = torch.matmul(rows[active], keys.transpose(2, 3)) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            key = torch.arange(first, first + KEY_TILE, device=scores.device)
            query = positions[active][:, :, None]
            seen = key <= query
            if metadata.window is not None:
                seen &= key > query - metadata.window
                # Blocks that left the window are another's by now, and 0 × NaN is NaN.
                values = values.masked_fill(~seen.any(dim=1)[:, None, :, None], 0.0)
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            new_maximum = torch.maximum(maximum[active], scores.amax(dim=-1))
            weights = torch.exp(scores - new_maximum[..., None])
            decay = torch.exp(maximum[active] - new_maximum)
            total[active] = total[active] * decay + weights.sum(dim=-1)
            mixed[active] = mixed[active] * decay[..., None] + torch.matmul(weights, values)
            maximum[active] = new_maximum
        mixed = (mixed / total[..., None]).unflatten(2, (per_tile, group_size)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        output = queries.new_empty(*queries.shape[:2], spec.head_dim_v)
        output[tiles.tokens[~tiles.is_padding]] = mixed[~tiles.is_padding].to(output.dtype)
        return output


def _cut(blocks: Tensor, starts: Tensor) -> Tensor:
    """[n, width, block_tokens, heads, dim] -> the KEY_TILE tokens from `starts` on, [n, KEY_TILE, heads, dim]."""
    tokens = blocks.flatten(1, 2)
    index = starts[:, None] + torch.arange(KEY_TILE, device=tokens.device)
    return tokens[torch.arange(len(tokens), device=tokens.device)[:, None], index]


def _plan_tiles(metadata: AttentionMetadata, per_tile: int) -> _Tiles:
    device, size = metadata.block_table.device, metadata.block_tokens
    tokens, padding, positions, sequences, first_tiles, last_tiles = [], [], [], [], [], []
    for sequence, seq_len in enumerate(metadata.seq_lens):
        start, num_queries = metadata.query_start_loc[sequence], metadata.num_queries(sequence)
        for first in range(0, num_queries, per_tile):
            count = min(per_tile, num_queries - first)
            rows = [first + min(row, count - 1) for row in range(per_tile)]
            position = [seq_len - num_queries + row for row in rows]
            tokens.append([start + row for row in rows])
            padding.append([row >= count for row in range(per_tile)])
            positions.append(position)
            sequences.append(sequence)
            oldest = 0 if metadata.window is None else max(0, position[0] - metadata.window + 1)
            first_tiles.append(oldest // KEY_TILE)
            last_tiles.append(position[-1] // KEY_TILE)
    width = -(-KEY_TILE // size) + (KEY_TILE % size != 0)
    last_column = metadata.block_table.shape[1] - 1
    active, blocks, starts = [], [], []
    for tile in range(min(first_tiles), max(last_tiles) + 1):
        readers = [i for i, (low, high) in enumerate(zip(first_tiles, last_tiles, strict=True)) if low <= tile <= high]
        columns = torch.arange(width, device=device) + tile * KEY_TILE // size
        owners = torch.tensor([sequences[i] for i in readers], device=device, dtype=torch.int64)
        active.append(torch.tensor(readers, device=device, dtype=torch.int64))
        blocks.append(metadata.block_table[owners[:, None], columns.clamp(max=last_column)])
        starts.append(torch.full((len(readers),), tile * KEY_TILE % size, device=device))
    return _Tiles(
        tokens=torch.tensor(tokens, device=device),
        is_padding=torch.tensor(padding, device=device),
        positions=torch.tensor(positions, device=device),
        first_key_tile=min(first_tiles),
        active=active,
        blocks=blocks,
        starts=starts,
    )
