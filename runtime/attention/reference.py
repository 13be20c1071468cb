"""Attention as its definition: one query, one head at a time, in float32. The oracle of every other backend."""

import torch

from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.kv_store import KVStore


class ReferenceAttention:
    name = "reference"

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def __call__(
        self, queries: torch.Tensor, layer: int, store: KVStore, prepared: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        metadata = prepared
        k_blocks, v_blocks = store.layer(layer)
        num_tokens, num_heads, _ = queries.shape
        group_size = num_heads // k_blocks.shape[2]
        output = torch.empty(num_tokens, num_heads, v_blocks.shape[3], dtype=queries.dtype, device=queries.device)
        for sequence, seq_len in enumerate(metadata.seq_lens):
            start, end = metadata.query_start_loc[sequence : sequence + 2]
            for token in range(start, end):
                position = seq_len - (end - token)
                first = 0 if metadata.window is None else max(0, position - metadata.window + 1)
                seen = torch.arange(first, position + 1)
                blocks = metadata.block_table[sequence, seen // metadata.block_tokens]
                offsets = seen % metadata.block_tokens
                for head in range(num_heads):
                    keys = k_blocks[blocks, offsets, head // group_size].float()
                    values = v_blocks[blocks, offsets, head // group_size].float()
                    weights = torch.softmax(keys @ queries[token, head].float() * scale, dim=0)
                    output[token, head] = (weights @ values).to(output.dtype)
        return output
