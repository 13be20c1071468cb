"""What every attention backend computes: one signature, whatever the kernel."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llmq.runtime.kv_store import KVStore, Slots


@dataclass(frozen=True)
class AttentionMetadata:
    """Who attends to what in one step, for one KV-cache group.

    Sequence i has queries query_start_loc[i] : query_start_loc[i + 1]. They are its last ones: the keys they see are
    positions 0 … seq_lens[i] - 1 (of which a window keeps the last), at block_table[i, position // block_tokens].
    """

    query_start_loc: list[int]  # num_seqs + 1
    seq_lens: list[int]  # num_seqs; tokens of the sequence after this step
    block_table: torch.Tensor  # [num_seqs, max_blocks], int64
    slots: Slots  # of the new tokens
    block_tokens: int
    window: int | None

    def num_queries(self, sequence: int) -> int:
        return self.query_start_loc[sequence + 1] - self.query_start_loc[sequence]

    def first_key(self, sequence: int) -> int:
        """First position that any query of `sequence` sees."""
        if self.window is None:
            return 0
        return max(0, self.seq_lens[sequence] - self.num_queries(sequence) - self.window + 1)


class AttentionBackend(Protocol):
    name: str
    reads_unwritten: bool  # slots that were never written, behind a mask: they must hold numbers

    def prepare(self, metadata: AttentionMetadata) -> Any:
        """What the layers of a group share in one step: index tensors, masks, launch plans."""
        ...

    def __call__(
        self,
        queries: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
        layer: int,
        store: KVStore,
        prepared: Any,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim_v]
        """Causal attention over the stored K and V of `layer`, the current chunk's included.

        `softcap` c: the scores s = scale · q·k become c · tanh(s / c) before the softmax.
        """
        ...
