"""Decode steps replayed from CUDA graphs: a step's launches cost the host nothing once they were captured.

A graph holds addresses and sizes, so each number of sequences, rounded up to a bucket, has buffers of its own, into
which a step is copied. Sequences that fill a bucket up have no queries, and write nowhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmq.profiles.kv_spec import KVCacheLayout
from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.attention.triton import FEW_ROWS, TritonAttention, power_of_two
from llmq.runtime.batch import BatchInputs
from llmq.runtime.kernels.triton.attention import Tiles
from llmq.runtime.kernels.triton.launch import Target
from llmq.runtime.kv_store import Slots
from llmq.runtime.programs.triton import TritonProgram
from llmq.runtime.staging import Staging

# (what makes a result) -> what makes it again, into the same tensor
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
NOWHERE = -1  # the block of a token that is not written


def buckets(most: int) -> list[int]:
    """1, 2, 4, 8, then every eighth number of sequences up to `most`: at most seven for nothing."""
    return sorted({n for n in (1, 2, 4, *range(8, most, 8), most) if n <= most})


class CudaCapture:
    """Captures one graph after the other into one pool of memory, of which each then uses as much as it needs: steps
    come one at a time, and nobody reads what a step left there once the next has begun."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, make: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run it aside first, for kernels are compiled and libraries set up when they are first called."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            make()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = make()
        return graph.replay, result


class DecodeBuffers:
    """A decode step of up to `size` sequences at fixed addresses."""

    def __init__(self, layout: KVCacheLayout, size: int, max_model_len: int, device: torch.device) -> None:
        integers = {"dtype": torch.int64, "device": device}
        self.size = size
        self.tiles = torch.zeros(size, 4, dtype=torch.int32, device=device)
        attention = []
        for group in layout.groups:
            slots = Slots(torch.full((size,), NOWHERE, **integers), torch.zeros(size, **integers))
            table = torch.zeros(size, -(-max_model_len // group.block_tokens), **integers)
            attention.append(AttentionMetadata([], [], table, slots, group.block_tokens, group.spec.window))
        self.inputs = BatchInputs(
            token_ids=torch.zeros(size, **integers),
            positions=torch.zeros(size, **integers),
            query_start_loc=[],
            attention=tuple(attention),
            group_of_layer=layout.group_of_layer,
        )
        self.prepared = [GraphedStep(metadata, self.tiles, max_model_len) for metadata in attention]

    def load(self, step: BatchInputs, staging: Staging) -> None:
        """Copy a step of at most `size` sequences in; the others get no query."""
        count = len(step.token_ids)
        rows = np.zeros((self.size, 4), dtype=np.int32)
        rows[:, 0] = rows[:, 1] = np.arange(self.size)
        rows[:count, 2] = 1
        rows[:count, 3] = np.array(step.attention[0].seq_lens) - 1
        self.tiles.copy_(staging.send([rows])[0])
        self.inputs.token_ids[:count].copy_(step.token_ids)
        self.inputs.positions[:count].copy_(step.positions)
        for own, other in zip(self.inputs.attention, step.attention, strict=True):
            own.block_table[:count, : other.block_table.shape[1]].copy_(other.block_table)
            own.slots.block[:count].copy_(other.slots.block)
            own.slots.block[count:].fill_(NOWHERE)
            own.slots.offset[:count].copy_(other.slots.offset)


@dataclass(frozen=True)
class GraphedStep:
    """What attention reads of a step in a graph: one tile a sequence, whatever their lengths."""

    metadata: AttentionMetadata
    table: Tensor
    most_keys: int

    def tiles(self, group: int) -> list[Tiles]:
        rows = max(FEW_ROWS, power_of_two(group))
        window = self.metadata.window
        most_keys = self.most_keys if window is None else min(self.most_keys, window + 1)
        return [Tiles(self.table, len(self.table), rows // group, rows, most_keys)]

    @property
    def block_table(self) -> Tensor:
        return self.metadata.block_table

    @property
    def target(self) -> Target:
        return Target.of(self.table.device)


class GraphedProgram:
    """Steps in which every sequence has one query come from graphs; the others are computed as they come."""

    def __init__(
        self, eager: TritonProgram, max_num_seqs: int, max_model_len: int, capture: Capture | None = None
    ) -> None:
        self.eager, self.model, self.store = eager, eager.model, eager.store
        self.name, self._attention = f"{eager.name}, decoding in CUDA graphs", TritonAttention()
        self.attention_kernel = self._attention.name
        if eager.attention_kernel != self._attention.name:
            self.attention_kernel = f"{eager.attention_kernel}, {self._attention.name} in CUDA graphs"
        self._buckets = buckets(max_num_seqs)
        self._max_model_len, self._capture = max_model_len, capture or CudaCapture()
        self._graphs: dict[int, tuple[DecodeBuffers, Callable[[], None], Tensor]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """All graphs, the largest first: the others then find room in its pool. No request waits for one later."""
        for size in reversed(self._buckets):
            self._graph(size)

    def forward(self, inputs: BatchInputs) -> Tensor:
        count = len(inputs.token_ids)
        if not self._is_decode(inputs):
            return self.eager.forward(inputs)
        size = next(size for size in self._buckets if size >= count)
        buffers, replay, result = self._graph(size)
        buffers.load(inputs, self.store.staging)
        replay()
        return result[:count]

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self.eager.logits(hidden)

    def _graph(self, size: int) -> tuple[DecodeBuffers, Callable[[], None], Tensor]:
        if size not in self._graphs:
            buffers = DecodeBuffers(self.store.layout, size, self._max_model_len, self.store.device)
            self._graphs[size] = (
                buffers,
                *self._capture(lambda: self.eager.compute(buffers.inputs, self._attention, buffers.prepared)),
            )
        return self._graphs[size]

    def _is_decode(self, inputs: BatchInputs) -> bool:
        count = len(inputs.token_ids)
        return count <= self._buckets[-1] and inputs.output_rows is None and len(inputs.query_start_loc) == count + 1
