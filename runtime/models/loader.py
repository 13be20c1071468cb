"""Which code runs a checkpoint: the decoder that is described by data, or transformers' own."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Protocol

import torch

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.families import FAMILIES
from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.batch import BatchInputs
from llmq.runtime.dtypes import NativeNumerics
from llmq.runtime.kv_store import KVStore
from llmq.runtime.parallel.collectives import Collectives
from llmq.runtime.parallel.shard_plan import check_ranks
from llmq.runtime.parallel.stage_plan import Stage, check_stages
from llmq.runtime.weights import DecoderLoader


class Model(Protocol):
    """What the runner runs."""

    num_bytes: int  # of all weights in memory
    kernels: frozenset[str]  # what multiplies the linears of the layers
    rotations: frozenset[str]  # the kinds of its rotary embeddings
    dense_weights: Mapping[str, torch.Tensor]  # linears in 16 bit, by name: what is multiplied with

    def forward(self, inputs: BatchInputs, store: KVStore, attention: AttentionBackend) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of the step, after the final norm. Only `inputs.output_rows` are
        read: the others may hold anything."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]; None on ranks but the first,
        which all have to ask."""
        ...


class ModelLoader(Protocol):
    implementation: str  # whose modelling code runs
    schemes: dict[str, int]  # what linears are made of -> how many
    packed_weights: str  # where native kernels' own are kept on disk, for people; empty: they are not

    def load(self, max_model_len: int) -> Model: ...

    def kv_scales(self) -> dict[int, tuple[float, float]]: ...


def make_loader(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    native: NativeNumerics | None = None,
    collectives: Collectives | None = None,
    first_layer: int = 0,
    stage: Stage | None = None,
) -> ModelLoader:
    """The loader of a checkpoint, or with `collectives` of a rank's part, with `stage` of some layers; they have the
    numbers from `first_layer` on in the KVStore; native: for our own kernels, where they run a linear. Raises
    InputError, before any weight is read, for what cannot run."""
    family = checkpoint.architecture.family
    if family is not None:
        return DecoderLoader(
            checkpoint, family, dtype, device, batch_invariant, native, collectives, first_layer, stage
        )
    if first_layer:
        raise InputError(
            f"--draft-model: model_type {checkpoint.architecture.model_type!r} runs by transformers' own code, whose "
            f"layers have no place beside another model's ({', '.join(FAMILIES)} have)"
        )
    if stage is not None:
        check_stages(checkpoint.architecture, stage.num_stages)
    if collectives is not None:
        check_ranks(checkpoint.architecture, checkpoint.config, collectives.num_ranks)
    if batch_invariant:
        raise InputError(
            f"--batch-invariant: model_type {checkpoint.architecture.model_type!r} runs by transformers' own code, "
            f"whose products llmq does not tile (it does for {', '.join(FAMILIES)})"
        )
    if find_spec("transformers") is None:
        raise InputError(
            f"model_type {checkpoint.architecture.model_type!r} runs by transformers' own code, which is not installed "
            f"here: pip install 'transformers>=5.15,<5.18' (without it the runtime runs {', '.join(FAMILIES)})"
        )
    # The one place where the runtime needs transformers.
    from llmq.runtime.models.transformers_decoder import TransformersLoader

    return TransformersLoader(checkpoint, dtype, device)
