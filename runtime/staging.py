"""Numbers of a step on their way from host to device: packed into pinned memory, copied at once, and not waited for."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# The widest load of a kernel, and what a cache line is: each array begins on a border of it.
_ALIGNMENT = 64
# One is being copied, or was, while the next step's is filled.
NUM_BUFFERS = 2

_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
}


class Staging(Protocol):
    """How the numbers of a step get from numpy to where they are computed with."""

    def begin_step(self) -> None: ...

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """The arrays on the device, contiguous, each of its own shape and dtype. They belong to it from here on: what
        is written to them later may arrive or not."""
        ...

    def send_integers(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """int64."""
        ...


class Event(Protocol):
    """A point in a device's stream, as `torch.cuda.Event`."""

    def synchronize(self) -> None: ...


class Copies(Protocol):
    """How bytes get to a device."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Host memory that copies are made from, uint8."""
        ...

    def start(self, source: Tensor) -> Tensor:
        """The same bytes on the device, for whoever comes after in its stream: they may still be on their way."""
        ...

    def mark(self) -> Event:
        """Passed when all copies that were started are over."""
        ...


class CudaCopies:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, source: Tensor) -> Tensor:
        return source.to(self._device, non_blocking=True)

    def mark(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Over:
    def synchronize(self) -> None:
        pass


_OVER = _Over()


class _Buffer:
    """One of the buffers in turn: filled from its start to `used`, free again after `copied`."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.used = memory, 0
        self.copied: Event = _OVER


class HostStaging:
    """Where the device is the host: numbers are where they have to be."""

    def begin_step(self) -> None:
        pass

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def send_integers(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.from_numpy(np.array(numbers, dtype=np.int64))


class DeviceStaging:
    """Buffers that steps use in turn, so that the host fills one while the other is copied from.

    A blocking copy waits for all that the device has to do before it. From pinned memory it does not, and then nothing
    tells when the memory may be written again but an event: a buffer's turn begins when its last copies are over.
    """

    def __init__(self, copies: Copies, num_bytes: int = 1 << 16) -> None:
        """num_bytes: of a buffer at first; one that is too small is replaced."""
        self._copies = copies
        self._buffers = [_Buffer(copies.buffer(num_bytes)) for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def begin_step(self) -> None:
        """The other buffer's turn. Waits until it is no longer copied from."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        buffer = self._buffers[self._turn]
        buffer.copied.synchronize()
        buffer.used = 0

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """In one copy, of which each array is a view."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._room_for(end)
        host = buffer.memory.numpy()
        for start, array in zip(starts, arrays, strict=True):
            place = host[buffer.used + start : buffer.used + start + array.nbytes]
            place.view(array.dtype).reshape(array.shape)[...] = array
        device = self._copies.start(buffer.memory[buffer.used : buffer.used + end])
        buffer.used += end
        buffer.copied = self._copies.mark()
        return [_view(device, start, array) for start, array in zip(starts, arrays, strict=True)]

    def send_integers(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return self.send([np.array(numbers, dtype=np.int64)])[0]

    def _room_for(self, num_bytes: int) -> _Buffer:
        buffer = self._buffers[self._turn]
        if buffer.used + num_bytes <= len(buffer.memory):
            return buffer
        # What was copied from the old one may still be on its way: it is freed behind that.
        buffer.copied.synchronize()
        replaced = _Buffer(self._copies.buffer(max(2 * len(buffer.memory), num_bytes)))
        self._buffers[self._turn] = replaced
        return replaced


def staging_of(device: torch.device) -> Staging:
    return DeviceStaging(CudaCopies(device)) if device.type == "cuda" else HostStaging()


def _view(device: Tensor, start: int, array: np.ndarray) -> Tensor:
    dtype = _TORCH_DTYPES[array.dtype]
    if not array.nbytes:  # no bytes have no stride that another dtype could be viewed by
        return device.new_empty(array.shape, dtype=dtype)
    return device[start : start + array.nbytes].view(dtype).view(array.shape)


class Fetched:
    """A tensor on its way to the host: the copy begins at once, so that who reads it waits for what was launched before
    it, and for nothing that came after."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Event = _OVER
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Tensor:
        self._event.synchronize()
        return self._host
