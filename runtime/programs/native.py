"""A decoder lowered once to a list of native operations: a whole step is one call."""

import torch
from torch import Tensor

from llmq.runtime.attention.native import NativeAttention, rounds_to_bytes
from llmq.runtime.batch import BatchInputs
from llmq.runtime.dtypes import NativeNumerics
from llmq.runtime.kv_store import KVStore
from llmq.runtime.models.decoder import Decoder
from llmq.runtime.programs.lowering import lower


class NativeProgram:
    name = "native"

    def __init__(self, decoder: Decoder, store: KVStore, numerics: NativeNumerics | None = None) -> None:
        """Raises NotLoweredError for a decoder with a part that has no native operation."""
        self._lowered = lower(decoder, store)
        self.model = decoder
        self._attention = NativeAttention(rounds_to_bytes(numerics, store.layout))
        self.attention_kernel = self._attention.name

    def forward(self, inputs: BatchInputs) -> Tensor:
        prepared = [self._attention.prepare(metadata) for metadata in inputs.attention]
        hidden = torch.empty(len(inputs.token_ids), self._lowered.hidden_size, dtype=torch.bfloat16)
        self._lowered.program.run(
            len(inputs.token_ids),
            inputs.token_ids.data_ptr(),
            inputs.positions.data_ptr(),
            [
                (one.plan, metadata.slots.block.data_ptr(), metadata.slots.offset.data_ptr())
                for one, metadata in zip(prepared, inputs.attention, strict=True)
            ],
            self._lowered.result,
            hidden.data_ptr(),
        )
        return hidden

    def start_timing(self) -> None:
        """From here on the operations of each step are timed."""
        self._lowered.program.start_timing()

    def operation_times(self) -> list[tuple[str, float]]:
        """(operation, seconds) of each, in their order: of the steps since `start_timing` the fastest."""
        return self._lowered.program.times()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)
