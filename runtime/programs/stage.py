"""A program over some of the layers, between the stages before and behind it."""

from dataclasses import replace

import torch
from torch import Tensor

from llmq.runtime.batch import BatchInputs
from llmq.runtime.parallel.stage_link import StageLink
from llmq.runtime.programs.base import Program


class StageProgram:
    """Takes hidden states from the stage before, if there is one, and gives them to the next one. Only the last stage
    has logits."""

    def __init__(self, program: Program, link: StageLink, hidden_size: int, dtype: torch.dtype) -> None:
        self._program, self._link = program, link
        self._hidden_size, self._dtype = hidden_size, dtype
        self._is_first, self._is_last = link.stage == 0, link.stage == link.num_stages - 1
        self.name, self.model, self.attention_kernel = program.name, program.model, program.attention_kernel

    def forward(self, inputs: BatchInputs) -> Tensor:
        if not self._is_first:
            buffer = inputs.token_ids.new_empty((len(inputs.token_ids), self._hidden_size), dtype=self._dtype)
            inputs = replace(inputs, hidden=self._link.receive(buffer))
        if self._is_last:
            return self._program.forward(inputs)
        hidden = self._program.forward(replace(inputs, output_rows=None))  # the next stage's layers read all
        self._link.send(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self._program.logits(hidden) if self._is_last else None
