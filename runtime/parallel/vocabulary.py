"""Embedding and head of which each rank holds some words."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.runtime.parallel.collectives import Collectives
from llmq.runtime.parallel.shard_plan import Range, ShardPlan


@dataclass(frozen=True)
class SplitVocabulary:
    """This rank's words [start, stop), and those of every rank."""

    words: Range
    sizes: tuple[int, ...]
    collectives: Collectives

    @classmethod
    def of(cls, plan: ShardPlan, collectives: Collectives) -> "SplitVocabulary":
        return cls(plan.vocabulary, tuple(stop - start for start, stop in plan.vocabularies), collectives)

    def embed(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Embeddings [num_tokens, hidden_size] from this rank's `rows`: zero for others' words, summed over ranks."""
        start, stop = self.words
        is_elsewhere = (token_ids < start) | (token_ids >= stop)
        found = rows[(token_ids - start).masked_fill(is_elsewhere, 0)]
        return self.collectives.all_reduce(found.masked_fill_(is_elsewhere[:, None], 0))

    def gather(self, logits: Tensor) -> Tensor | None:
        """This rank's logits [num_rows, stop - start] -> everyone's, [num_rows, vocab_size], on rank 0; else None."""
        longest = max(self.sizes)
        parts = self.collectives.gather(F.pad(logits, (0, longest - logits.shape[1])))
        if parts is None:
            return None
        return torch.cat([part[:, :size] for part, size in zip(parts, self.sizes, strict=True)], dim=1)
