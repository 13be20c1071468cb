"""The decoder: one forward for every family in `profiles/families.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.batch import BatchInputs
from llmq.runtime.kv_store import KVStore
from llmq.runtime.layers.linear import Linear
from llmq.runtime.layers.mlp import MLP, Experts
from llmq.runtime.layers.native_linear import NativeLinear
from llmq.runtime.layers.norm import Norm, softcap
from llmq.runtime.layers.rope import RotaryEmbedding
from llmq.runtime.layers.self_attention import SelfAttention, Step
from llmq.runtime.parallel.vocabulary import SplitVocabulary


@dataclass(frozen=True)
class ResidualBlock:
    """x + scale · after(part(before(x))): half a layer. A norm that is None is not there.

    all_reduce: where ranks share the part, what sums its result over them.
    """

    part: SelfAttention | MLP | Experts
    before: Norm | None
    after: Norm | None
    scale: float | None
    all_reduce: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        y = x if self.before is None else self.before(x)
        y = self.part(y, step) if isinstance(self.part, SelfAttention) else self.part(y)
        if self.all_reduce is not None:
            y = self.all_reduce(y)
        if self.after is not None:
            y = self.after(y)
        return x + (y if self.scale is None else y * self.scale)

    @property
    def num_bytes(self) -> int:
        norms = [norm for norm in (self.before, self.after) if norm is not None]
        return sum(one.num_bytes for one in (*self.part.linears, *norms))


@dataclass(frozen=True)
class OutputHead:
    """Hidden states -> logits: a linear, then what a family does to its result."""

    linear: Linear
    divisor: float | None = None
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        if isinstance(self.linear, NativeLinear):
            logits = self.linear(hidden, torch.float32)
        else:
            logits = self.linear(hidden).float()
        if self.divisor is not None:
            logits = logits / self.divisor
        return logits if self.softcap is None else softcap(logits, self.softcap)


class Decoder:
    """Token ids and positions of a step -> hidden states, reading and writing the KVStore on the way.

    A stage of several has an embedding, or a final norm and a head, or neither: it goes on from `BatchInputs.hidden`,
    and what its last layer makes is what the next one goes on from.
    """

    def __init__(
        self,
        embedding: Tensor | None,
        embedding_scale: float | None,
        blocks: Sequence[ResidualBlock],
        final_norm: Norm | None,
        head: OutputHead | None,
        ropes: Sequence[RotaryEmbedding],
        dense_weights: Mapping[str, Tensor],
        vocabulary: SplitVocabulary | None = None,
    ) -> None:
        self.embedding = embedding  # [vocab_size, hidden_size]; of a split vocabulary this rank's words
        self.embedding_scale = embedding_scale
        self.blocks = blocks
        self.final_norm = final_norm
        self.head = head
        self.ropes = ropes
        self.vocabulary = vocabulary
        self.dense_weights = dense_weights  # by the checkpoint's names: views of what `blocks` multiply with

    @property
    def is_whole(self) -> bool:
        return self.embedding is not None and self.head is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in memory; a tied head counts once."""
        total = sum(block.num_bytes for block in self.blocks)
        if self.embedding is not None:
            total += self.embedding.nbytes
        if self.head is not None:
            total += self.final_norm.num_bytes
            is_tied = self.embedding is not None and getattr(self.head.linear, "weight", None) is self.embedding
            total += 0 if is_tied else self.head.linear.num_bytes
        return total

    @property
    def kernels(self) -> frozenset[str]:
        """Names of what multiplies the linears of the layers."""
        return frozenset(linear.kernel for block in self.blocks for linear in block.part.linears)

    @property
    def rotations(self) -> frozenset[str]:
        return frozenset(rope.name for rope in self.ropes)

    def first_layers(self, num_layers: int) -> "Decoder":
        """The decoder that ends after `num_layers` layers, with the same norm and head; all weights are shared."""
        return Decoder(
            embedding=self.embedding,
            embedding_scale=self.embedding_scale,
            blocks=self.blocks[: 2 * num_layers],
            final_norm=self.final_norm,
            head=self.head,
            ropes=self.ropes,
            dense_weights=self.dense_weights,
            vocabulary=self.vocabulary,
        )

    def forward(self, inputs: BatchInputs, store: KVStore, attention: AttentionBackend) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the final norm, if it is here; of other rows than
        `inputs.output_rows` what they were before the last MLP, which nobody reads."""
        step = Step.of(inputs, store, attention, self.ropes)
        hidden = self.enter(inputs)
        *blocks, last = self.blocks
        for block in blocks:
            hidden = block(hidden, step)
        rows = inputs.output_rows
        if rows is None or isinstance(last.part, SelfAttention):
            return self._normed(last(hidden, step))
        if len(rows):
            hidden[rows] = self._normed(last(hidden[rows], step))
        return hidden

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]; None on other ranks than the
        first."""
        logits = self.head(hidden)
        return logits if self.vocabulary is None else self.vocabulary.gather(logits)

    def enter(self, inputs: BatchInputs) -> Tensor:
        """The residual stream before the first block, [num_tokens, hidden_size]."""
        return self.embed(inputs.token_ids) if inputs.hidden is None else inputs.hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """The residual stream of token ids [num_tokens] before the first layer, [num_tokens, hidden_size]."""
        if self.vocabulary is None:
            hidden = self.embedding[token_ids]
        else:
            hidden = self.vocabulary.embed(self.embedding, token_ids)
        return hidden if self.embedding_scale is None else hidden * self.embedding_scale
