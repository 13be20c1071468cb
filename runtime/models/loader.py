"""Which loader reads a checkpoint: the decoder that is described by data, or transformers' own code."""

from typing import Protocol

import torch

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.families import FAMILIES
from llmq.runtime.models.decoder import Decoder
from llmq.runtime.weights import DecoderLoader


class ModelLoader(Protocol):
    implementation: str  # whose modelling code runs
    schemes: dict[str, int]  # what linears are made of -> how many

    def load(self, max_model_len: int) -> Decoder: ...

    def kv_scales(self) -> dict[int, tuple[float, float]]: ...


def make_loader(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> ModelLoader:
    """The loader of a checkpoint. Raises InputError, before any weight is read, for what cannot run."""
    family = checkpoint.architecture.family
    if family is None:
        model_type = checkpoint.architecture.model_type
        raise InputError(f"the runtime does not run model_type {model_type!r} yet (it runs {', '.join(FAMILIES)})")
    return DecoderLoader(checkpoint, family, dtype, device)
