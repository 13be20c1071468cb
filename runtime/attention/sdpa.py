"""Paged attention on torch's scaled_dot_product_attention: K and V of a batch are gathered from their blocks."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.kv_store import KVStore

# Sequences of one call are padded to the longest of them; another call is cheaper than reading this much more.
MAX_PADDING = 1.5
# Sequences with at most this many queries share calls, by similar numbers of queries too: a call costs as much as the
# attention of some dozens of queries. A longer chunk is computed alone, causally and without a mask where it can be.
MAX_SHARED_QUERIES = 64
# A chunk of a longer prompt goes through the CPU's kernel this many queries at a time, with the keys that they see: the
# kernel computes what a mask hides too. Much fewer queries read the keys too often.
QUERIES_PER_TILE = 256
# A softcap has no fused kernel: its scores are held, in float32, this many at a time (64 MiB).
SCORES_PER_TILE = 2**24


@dataclass(frozen=True)
class _Call:
    """Sequences computed together, padded to the most queries (by repeating a sequence's last one) and keys."""

    tokens: torch.Tensor  # [batch, num_queries]: rows of the step
    table: torch.Tensor  # [batch, width]: blocks that hold the keys
    num_keys: int  # of the longest, counted from the first block of `table`
    mask: torch.Tensor | None  # [batch, num_queries, num_keys], True where seen; None: causal over all keys
    tiles: list[tuple[slice, slice]]  # of queries, and of the keys that they see


class SdpaAttention:
    name = "sdpa"
    reads_unwritten = True

    def prepare(self, metadata: AttentionMetadata) -> list[_Call]:
        return [_plan_call(metadata, sequences) for sequences in _batches(metadata)]

    def __call__(
        self,
        queries: torch.Tensor,
        layer: int,
        store: KVStore,
        prepared: list[_Call],
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        # torch's kernel for CPUs takes the KV heads as they are, without a copy for each head.
        grouped = softcap is None and queries.device.type == "cpu"
        attend = partial(F.scaled_dot_product_attention, enable_gqa=grouped)
        if softcap is not None:
            attend = partial(_softcapped_attention, softcap=softcap)
        spec = store.spec(layer)
        num_heads, num_kv_heads = queries.shape[1], spec.num_kv_heads
        group_size = num_heads // num_kv_heads
        output = queries.new_empty(*queries.shape[:2], spec.head_dim_v)
        for call in prepared:
            batch, num_queries = call.tokens.shape
            # [batch, num_kv_heads, num_keys, head_dim]
            keys, values = (
                part.flatten(1, 2)[:, : call.num_keys].transpose(1, 2)
                for part in store.read(layer, call.table, queries.dtype)
            )
            rows = queries[call.tokens]  # [batch, num_queries, num_heads, head_dim]
            if num_queries == 1:
                # The heads that share a KV head are its queries: K and V are read once for all of them.
                rows = rows.reshape(batch, num_kv_heads, group_size, -1)
                mask = None if call.mask is None else call.mask[:, None]
                result = attend(rows, keys, values, attn_mask=mask, scale=scale)
                output[call.tokens] = result.reshape(batch, 1, num_heads, -1)
            else:
                if group_size > 1 and not grouped:
                    keys, values = (part.repeat_interleave(group_size, dim=1) for part in (keys, values))
                for tile, seen in call.tiles:
                    result = attend(
                        rows[:, tile].transpose(1, 2),
                        keys[:, :, seen],
                        values[:, :, seen],
                        attn_mask=None if call.mask is None else call.mask[:, None, tile, seen],
                        is_causal=call.mask is None,
                        scale=scale,
                    )
                    output[call.tokens[:, tile]] = result.transpose(1, 2)
        return output


def _softcapped_attention(
    queries: torch.Tensor,  # [batch, num_heads, num_queries, head_dim]
    keys: torch.Tensor,  # [batch, num_heads, num_keys, head_dim]
    values: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,  # [batch, 1, num_queries or 1, num_keys]
    scale: float,
    softcap: float,
    is_causal: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention with a softcap between the product and the softmax, a few queries at a time."""
    (batch, num_heads, num_queries, _), num_keys = queries.shape, keys.shape[2]
    tile = max(1, SCORES_PER_TILE // (batch * num_heads * num_keys))
    output = queries.new_empty(*queries.shape[:3], values.shape[3])
    for start in range(0, num_queries, tile):
        rows = slice(start, min(start + tile, num_queries))
        scores = (queries[:, :, rows] @ keys.transpose(2, 3)).float().mul_(scale / softcap).tanh_().mul_(softcap)
        if is_causal:
            position = torch.arange(num_keys, device=scores.device)
            scores.masked_fill_(position > position[rows, None], -torch.inf)
        elif attn_mask is not None:
            seen = attn_mask if attn_mask.shape[2] == 1 else attn_mask[:, :, rows]
            scores.masked_fill_(~seen, -torch.inf)
        output[:, :, rows] = scores.softmax(dim=-1).to(values.dtype) @ values
    return output


def _batches(metadata: AttentionMetadata) -> list[list[int]]:
    """Sequences to compute together: few queries by similar numbers of queries and keys, long chunks alone."""
    num_keys = [metadata.seq_lens[s] - metadata.first_key(s) for s in range(len(metadata.seq_lens))]
    num_queries = [metadata.num_queries(s) for s in range(len(num_keys))]
    batches = [[s] for s, count in enumerate(num_queries) if count > MAX_SHARED_QUERIES]
    short = [s for s, count in enumerate(num_queries) if count <= MAX_SHARED_QUERIES]
    for same in _runs(sorted(short, key=num_queries.__getitem__), num_queries, slack=0):
        batches += _runs(sorted(same, key=num_keys.__getitem__), num_keys, slack=metadata.block_tokens)
    return batches


def _runs(ordered: list[int], sizes: list[int], slack: int) -> list[list[int]]:
    """Sequences in order of size, split where padding the first to the size of the last would cost too much."""
    runs: list[list[int]] = []
    for sequence in ordered:
        if not runs or sizes[sequence] > MAX_PADDING * sizes[runs[-1][0]] + slack:
            runs.append([])
        runs[-1].append(sequence)
    return runs


def _plan_call(metadata: AttentionMetadata, sequences: list[int]) -> _Call:
    device, size = metadata.block_table.device, metadata.block_tokens
    counts = torch.tensor([metadata.num_queries(s) for s in sequences], device=device)
    num_queries = int(counts.max())
    starts = torch.tensor([metadata.query_start_loc[s] for s in sequences], device=device)
    seq_lens = torch.tensor([metadata.seq_lens[s] for s in sequences], device=device)
    first_blocks = torch.tensor([metadata.first_key(s) // size for s in sequences], device=device)
    # Keys are counted from the first block that a sequence sees.
    lengths = seq_lens - first_blocks * size
    num_keys = int(lengths.max())
    columns = first_blocks[:, None] + torch.arange(-(-num_keys // size), device=device)
    columns = columns.clamp(max=metadata.block_table.shape[1] - 1)  # padding: any block, masked below
    key = torch.arange(num_keys, device=device)
    row = torch.arange(num_queries, device=device).minimum(counts[:, None] - 1)  # [batch, num_queries]
    query = (lengths - counts)[:, None] + row
    mask = None
    if metadata.window is not None:
        mask = (key <= query[..., None]) & (key > query[..., None] - metadata.window)
    elif len(sequences) > 1 or num_queries not in (1, num_keys):  # torch's is_causal aligns first query and first key
        mask = key <= query[..., None]
    return _Call(
        tokens=starts[:, None] + row,
        table=metadata.block_table[torch.tensor(sequences, device=device)[:, None], columns],
        num_keys=num_keys,
        mask=mask,
        tiles=_tiles(
            *(num_queries, num_keys, metadata.window),
            is_split=len(sequences) == 1 and mask is not None and device.type == "cpu",
        ),
    )


def _tiles(num_queries: int, num_keys: int, window: int | None, is_split: bool) -> list[tuple[slice, slice]]:
    """The queries of a call in tiles, each with all keys that one of its queries sees; the last query sees the last."""
    if not is_split:
        return [(slice(0, num_queries), slice(0, num_keys))]
    tiles = []
    for start in range(0, num_queries, QUERIES_PER_TILE):
        stop = min(start + QUERIES_PER_TILE, num_queries)
        behind = num_keys - num_queries
        first = 0 if window is None else max(0, behind + start - window + 1)
        tiles.append((slice(start, stop), slice(first, behind + stop)))
    return tiles
