"""EAGLE: a decoder layer that says the next hidden state from the last one and the token that was sampled from it.

Li et al. 2024 (arXiv 2401.15077). h[p] is the model's hidden state at position p after its final norm, x[p + 1] the
token that follows. The pair (x[p + 1], h[p]) is joined by a matrix and goes through the layer at position p, where it
sees the pairs before it. What comes out stands for h[p + 1]: the model's own head names x[p + 2] from it, and the next
guess comes of that pair. This is that paper's version; the several hidden states of EAGLE-3 are not read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.families import NormNames
from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.batch import BatchInputs
from llmq.runtime.kv_store import KVStore
from llmq.runtime.layers.rope import RotaryEmbedding
from llmq.runtime.layers.self_attention import Step
from llmq.runtime.models.decoder import Decoder, ResidualBlock
from llmq.runtime.parallel.collectives import Collectives
from llmq.runtime.weights import DecoderLoader, TensorReader

_PREFIX = "model."


@dataclass(frozen=True)
class EagleModel:
    """The pairs of a step -> what stands for the next hidden states."""

    embed: Callable[[Tensor], Tensor]  # token ids -> [num_tokens, hidden_size], by its own words or the model's
    join: Tensor  # [hidden_size, 2 * hidden_size]
    join_bias: Tensor | None
    blocks: Sequence[ResidualBlock]
    ropes: Sequence[RotaryEmbedding]
    num_bytes: int  # beside the model's own

    def forward(self, inputs: BatchInputs, store: KVStore, attention: AttentionBackend) -> Tensor:
        """[num_tokens, hidden_size] of the pairs of `inputs.token_ids` and `inputs.features`."""
        step = Step.of(inputs, store, attention, self.ropes)
        pairs = torch.cat([self.embed(inputs.token_ids), inputs.features], dim=-1)
        hidden = nn.functional.linear(pairs, self.join, self.join_bias)
        for block in self.blocks:
            hidden = block(hidden, step)
        return hidden


class _WithoutPrefix(TensorReader):
    """Names as decoders have them, of tensors stored without `model.` before them."""

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name.removeprefix(_PREFIX))

    def __iter__(self) -> Iterator[str]:
        return (f"{_PREFIX}{name}" for name in super().__iter__())

    def __call__(self, name: str) -> Tensor:
        return super().__call__(name.removeprefix(_PREFIX))


class EagleLoader(DecoderLoader):
    """Of a folder as the authors publish it: config.json, and in safetensors `fc.weight` (and `fc.bias`), `layers.0.…`
    without an input norm of the first layer, and `embed_tokens.weight` where it is not the model's."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        base: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        collectives: Collectives | None = None,
    ) -> None:
        """`base`: the model that it guesses for. collectives: of the ranks that share its layer, as `DecoderLoader`'s.
        Raises InputError for a folder of another model."""
        family, architecture = checkpoint.architecture.family, checkpoint.architecture
        if family is None:
            raise InputError(f"--draft-model: model_type {architecture.model_type!r} is no decoder of llmq's own")
        if "fc.weight" not in checkpoint.tensors:
            raise InputError(f"--draft-model {checkpoint.path}: there is no fc.weight, so this is no EAGLE head")
        sizes = [(one.hidden_size, one.vocab_size) for one in (architecture, base.architecture)]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"--draft-model {checkpoint.path}: a head of a model of {sizes[0][0]} hidden features and "
                f"{sizes[0][1]} words; this one has {sizes[1][0]} and {sizes[1][1]}"
            )
        first_layer = base.architecture.num_layers
        super().__init__(checkpoint, family, dtype, device, collectives=collectives, first_layer=first_layer)
        self.tensors = _WithoutPrefix(checkpoint)

    def load_head(self, model: Decoder, max_model_len: int) -> EagleModel:
        """`model`: whose embedding it shares where it has none of its own."""
        own = self._dense("model.embed_tokens.weight") if "model.embed_tokens.weight" in self.tensors else None
        bias = self._dense("model.fc.bias") if "model.fc.bias" in self.tensors else None
        join, ropes, blocks = self._dense("model.fc.weight"), self._ropes(max_model_len), []
        for index in range(self.architecture.num_layers):
            norms = self.family.attention_norms
            if f"model.layers.{index}.{norms.before}.weight" not in self.tensors:
                norms = NormNames(None, norms.after)
            blocks.append(self._block(index, norms, self._attention(index, ropes[index])))
            blocks.append(self._block(index, self.family.mlp_norms, self._mlp(index)))
        self._check_all_read()
        tensors = [tensor for tensor in (own, join, bias) if tensor is not None]
        return EagleModel(
            embed=partial(_embed, model) if own is None else own.__getitem__,
            join=join,
            join_bias=bias,
            blocks=blocks,
            ropes=list(dict.fromkeys(rope for rope in ropes if rope is not None)),
            num_bytes=sum(tensor.nbytes for tensor in tensors) + sum(block.num_bytes for block in blocks),
        )


def _embed(model: Decoder, token_ids: Tensor) -> Tensor:
    """Words of the model as they are stored, without what its family multiplies them by."""
    if model.vocabulary is None:
        return model.embedding[token_ids]
    return model.vocabulary.embed(model.embedding, token_ids)
