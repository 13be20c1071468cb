"""Attention as its definition: one query, one head at a time, in float32. The oracle of every other backend."""

import torch

from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.kv_store import KVStore


class ReferenceAttention:
    name = "reference"
    reads_unwritten = False

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def __call__(
        self,
        queries: torch.Tensor,
        layer: int,
        store: KVStore,
        prepared: AttentionMetadata,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        metadata = prepared
        num_tokens, num_heads, _ = queries.shape
        all_keys, all_values = store.read(layer, metadata.block_table, torch.float32)
        group_size = num_heads // all_keys.shape[3]
        output = queries.new_empty(num_tokens, num_heads, all_values.shape[4])
        for sequence, seq_len in enumerate(metadata.seq_lens):
            start, end = metadata.query_start_loc[sequence : sequence + 2]
            for token in range(start, end):
                position = seq_len - (end - token)
                first = 0 if metadata.window is None else max(0, position - metadata.window + 1)
                seen = torch.arange(first, position + 1)
                block, offset = seen // metadata.block_tokens, seen % metadata.block_tokens
                for head in range(num_heads):
                    keys = all_keys[sequence, block, offset, head // group_size]
                    values = all_values[sequence, block, offset, head // group_size]
                    scores = keys @ queries[token, head].float() * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    weights = torch.softmax(scores, dim=0)
                    output[token, head] = (weights @ values).to(output.dtype)
        return output
