"""A model's own forward, one torch operation after the other."""

from torch import Tensor

from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.batch import BatchInputs
from llmq.runtime.kv_store import KVStore
from llmq.runtime.models.loader import Model


class EagerProgram:
    def __init__(
        self, model: Model, store: KVStore, attention: AttentionBackend, why_not_native: str | None = None
    ) -> None:
        self.name = "torch" if why_not_native is None else f"torch ({why_not_native})"
        self.model, self.store, self.attention = model, store, attention
        self.attention_kernel = attention.name
        store.clears_unwritten |= attention.reads_unwritten

    def forward(self, inputs: BatchInputs) -> Tensor:
        return self.model.forward(inputs, self.store, self.attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)
