"""What computes a step: one signature, whoever does it."""

from typing import Protocol

from torch import Tensor

from llmq.runtime.batch import BatchInputs
from llmq.runtime.models.loader import Model


class Program(Protocol):
    name: str  # for the fingerprint, and for people at start
    model: Model
    attention_kernel: str

    def forward(self, inputs: BatchInputs) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of the step, after the final norm. Only `inputs.output_rows` are
        read: the others may hold anything. K and V of all the step's tokens are in the store afterwards."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        ...
