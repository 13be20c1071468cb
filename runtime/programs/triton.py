"""A decoder's forward on Triton kernels: sums with norms, rotation with the write into blocks, gates in one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.attention.triton import TritonAttention
from llmq.runtime.batch import BatchInputs
from llmq.runtime.kernels.triton.kv_write import rotate_and_write
from llmq.runtime.kernels.triton.row_kernels import GATES, MOST_FEATURES, gate, rms_norm
from llmq.runtime.kv_store import KVStore
from llmq.runtime.layers.grouped_experts import GroupedExperts
from llmq.runtime.layers.mlp import ACTIVATIONS, MLP, Activation, Experts
from llmq.runtime.layers.norm import Norm, RMSNorm
from llmq.runtime.layers.self_attention import SelfAttention
from llmq.runtime.models.decoder import Decoder, ResidualBlock


@dataclass
class ResidualStream:
    """hidden + scale · delta, [num_tokens, hidden_size]: the next norm adds what the last block made."""

    hidden: Tensor
    delta: Tensor | None = None
    scale: float = 1.0

    def normed(self, norm: Norm | None) -> Tensor:
        """The sum under a norm, or itself; it is `hidden` from then on."""
        hidden, delta = self.hidden, self.delta
        if isinstance(norm, RMSNorm) and hidden.shape[1] <= MOST_FEATURES:
            y = torch.empty_like(hidden)
            total = None if delta is None else hidden
            rms_norm(hidden, norm.weight, norm.eps, y, delta, self.scale, total).run()
            self.delta = None
            return y
        if delta is not None:
            hidden += delta if self.scale == 1.0 else delta * self.scale
            self.delta = None
        return hidden if norm is None else norm(hidden)

    def keep(self, rows: Tensor) -> None:
        """Go on with some tokens only."""
        self.hidden = self.hidden[rows]
        self.delta = None if self.delta is None else self.delta[rows]


class TritonProgram:
    name = "triton"

    def __init__(self, decoder: Decoder, store: KVStore, attention: AttentionBackend | None = None) -> None:
        """attention: of another's making, in place of the kernels of our own."""
        self.model, self.store, self.attention = decoder, store, attention or TritonAttention()
        self.attention_kernel = self.attention.name
        store.clears_unwritten |= self.attention.reads_unwritten
        self._grouped = {
            id(block.part): made
            for block in decoder.blocks
            if isinstance(block.part, Experts)
            and (made := GroupedExperts.of(block.part, _gate_name(block.part.experts[0].activation))) is not None
        }

    def forward(self, inputs: BatchInputs) -> Tensor:
        attention = self.attention
        return self.compute(inputs, attention, [attention.prepare(metadata) for metadata in inputs.attention])

    def compute(self, inputs: BatchInputs, attention: AttentionBackend, prepared: Sequence[Any]) -> Tensor:
        """`forward`, with what attention reads of the step, for each group. Waits for nothing on the device."""
        decoder, attend = self.model, partial(self._attend, inputs=inputs, attention=attention, prepared=prepared)
        stream = ResidualStream(decoder.enter(inputs).contiguous())
        *blocks, last = decoder.blocks
        for block in blocks:
            self._run(block, stream, attend)
        rows = inputs.output_rows
        if rows is None or isinstance(last.part, SelfAttention):
            self._run(last, stream, attend)
            return stream.normed(decoder.final_norm)
        result = stream.hidden
        if len(rows):
            stream.keep(rows)
            self._run(last, stream, attend)
            result[rows] = stream.normed(decoder.final_norm)
        return result

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self.model.logits(hidden)

    def _run(
        self, block: ResidualBlock, stream: ResidualStream, attend: Callable[[SelfAttention, Tensor], Tensor]
    ) -> None:
        x = stream.normed(block.before)
        if isinstance(block.part, SelfAttention):
            y = attend(block.part, x)
        elif isinstance(block.part, Experts):
            y = self._grouped.get(id(block.part), block.part)(x)
        else:
            y = _mlp(block.part, x)
        if block.all_reduce is not None:
            y = block.all_reduce(y)
        if block.after is not None:
            y = ResidualStream(y).normed(block.after)
        stream.delta, stream.scale = y, 1.0 if block.scale is None else block.scale

    def _attend(
        self,
        part: SelfAttention,
        x: Tensor,
        inputs: BatchInputs,
        attention: AttentionBackend,
        prepared: Sequence[Any],
    ) -> Tensor:
        settings, shape = part.settings, part.settings.shape
        q, k, v = part.project(x)
        group = inputs.group_of_layer[settings.layer]
        rotated = torch.empty_like(q, memory_format=torch.contiguous_format)
        launches = rotate_and_write(
            *(_rows(q), _rows(k), _rows(v)),
            None if part.rope is None else part.rope.tables,
            inputs.positions,
            inputs.attention[group].slots,
            self.store.parts(settings.layer),
            self.store.spec(settings.layer).dtype.name,
            rotated,
        )
        for launch in launches:
            launch.run()
        made = attention(rotated, settings.layer, self.store, prepared[group], settings.scale, settings.softcap)
        return part.o(made.view(len(x), settings.num_heads * shape.head_dim_v))


def _mlp(mlp: MLP, x: Tensor) -> Tensor:
    wide, name = mlp.wide(x), _gate_name(mlp.activation)
    if not mlp.gated:
        return mlp.out(mlp.activation(wide))
    if name is None:
        first, second = wide.chunk(2, dim=-1)
        return mlp.out(mlp.activation(first) * second)
    y = wide.new_empty(wide.shape[0], wide.shape[1] // 2)
    gate(wide, name, y).run()
    return mlp.out(y)


def _gate_name(activation: Activation) -> str | None:
    return next((name for name, made in ACTIVATIONS.items() if made is activation and name in GATES), None)


def _rows(x: Tensor) -> Tensor:
    """x [num_tokens, heads, dim], what is of one token contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
