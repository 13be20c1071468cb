"""The inputs of a decoder layer for all calibration samples: in memory up to a limit, beyond it in a mapped file."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmq.quantize.sizes import DEFAULT_MEMORY_BYTES

# Offsets in the file are multiples of a page: a mapped tensor is aligned as an allocated one, so that products of it
# come out the same to the last bit wherever it lies.
_PAGE_BYTES = 4096


class ActivationStore(Sequence[Tensor]):
    """float32 tensors on the CPU, each replaced by one of its own shape as a layer is passed.

    The first ones, `memory_bytes` in all, stay in memory. Every other one is mapped while somebody holds it, so that
    the process's memory has no more than those in use. A tensor that was handed out must not be changed in place, and
    changes when another takes its place.
    """

    def __init__(self, tensors: Iterable[Tensor], spill: Path, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        """spill: the file to make where `memory_bytes` do not suffice; `close` removes it."""
        self._spill = spill
        self._held: dict[int, Tensor] = {}
        self._shapes: list[tuple[int, ...]] = []
        self._offsets: dict[int, int] = {}
        self.spilled_bytes = 0
        held_bytes = 0
        for index, tensor in enumerate(tensors):
            self._shapes.append(tuple(tensor.shape))
            if held_bytes + tensor.nbytes <= memory_bytes:
                held_bytes += tensor.nbytes
            else:
                self._offsets[index] = self.spilled_bytes
                self.spilled_bytes += -(-tensor.nbytes // _PAGE_BYTES) * _PAGE_BYTES
                self._reserve()
            self[index] = tensor

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index not in self._offsets:
            return self._held[index]
        return self._map(index)

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self._shapes[index] or tensor.dtype != torch.float32:
            raise ValueError(f"activation {index} is {self._shapes[index]}, got {tuple(tensor.shape)} {tensor.dtype}")
        if index in self._offsets:
            self._map(index).copy_(tensor)
        elif index in self._held:
            # In its place: tensors that are made anew, some at a time, leave holes among each other.
            self._held[index].copy_(tensor)
        else:
            self._held[index] = tensor.to("cpu")

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def close(self) -> None:
        self._held.clear()
        self._spill.unlink(missing_ok=True)

    def _reserve(self) -> None:
        """Take the room on disk: a write to a mapped page that the disk has no room for would end the process."""
        with open(self._spill, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, self.spilled_bytes)

    def _map(self, index: int) -> Tensor:
        shape = self._shapes[index]
        return torch.from_numpy(np.memmap(self._spill, np.float32, "r+", offset=self._offsets[index], shape=shape))
