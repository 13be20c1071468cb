"""The GGUF container (versions 2 and 3, little-endian): metadata and a memory map of each tensor.

The `gguf` package's own reader keeps several Python objects for each of the vocabulary's strings: 20 s for 150,000 of
them, where this takes one.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.profiles.errors import InputError

# Value types of the format: id -> struct code. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it lies in the file."""

    name: str
    type_name: str  # "Q4_1", "F32"
    shape: tuple[int, ...]  # outermost first, as numpy and torch have it
    data: np.ndarray  # uint8 [*shape[:-1], bytes of a row], a memory map

    @property
    def num_bytes(self) -> int:
        return self.data.size


@dataclass(frozen=True)
class GGUFFile:
    fields: dict[str, Any]
    tensors: list[StoredTensor]


def read_gguf_file(path: Path) -> GGUFFile:
    """Read the metadata of `path` and map its tensors. Raises InputError for a file that is foreign, cut or newer."""
    with open(path, "rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise InputError(f"{path} is empty") from None
    if data[:4] != b"GGUF":
        raise InputError(f"{path} is no GGUF file")
    cursor = _Cursor(data)
    try:
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise InputError(f"{path}: GGUF version {version} is not one that llmq reads (2, 3; little-endian)")
        num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
        fields = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_fields)}
        heads = [_TensorHead.read(cursor) for _ in range(num_tensors)]
    except (struct.error, UnicodeDecodeError, KeyError, MemoryError) as error:
        raise InputError(f"{path}: its GGUF header is cut short or broken ({error})") from None
    alignment = fields.get("general.alignment", 32)
    start = -(-cursor.place // alignment) * alignment
    tensors = [head.map(data, start) for head in heads]
    if any(tensor is None for tensor in tensors):
        raise InputError(f"{path} is cut short: {len(data):,} bytes are not all of its tensors; fetch it again")
    return GGUFFile(fields, [tensor for tensor in tensors if tensor is not None])


class _Cursor:
    """Reads the header from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.place = 4  # past the magic

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._data, self.place)[0]
        self.place += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self._data[self.place : self.place + length]
        if len(raw) < length:
            raise struct.error("a string runs past the end")
        self.place += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            values = struct.unpack_from(f"<{length}{_SCALARS[kind]}", self._data, self.place)
            self.place += struct.calcsize(f"<{length}{_SCALARS[kind]}")
            return list(values)
        read: Callable[[], Any] = self.string if kind == _STRING else self._array
        return [read() for _ in range(length)]


@dataclass(frozen=True)
class _TensorHead:
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the first tensor's byte

    @classmethod
    def read(cls, cursor: _Cursor) -> "_TensorHead":
        name = cursor.string()
        innermost_first = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        return cls(name, tuple(reversed(innermost_first)), cursor.scalar("I"), cursor.scalar("Q"))

    def map(self, data: mmap.mmap, start: int) -> StoredTensor | None:
        """The tensor's bytes; None when the file ends before they do."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(self.type_id)
        except ValueError:
            raise InputError(f"{self.name}: GGUF tensor type {self.type_id} is not one that llmq knows") from None
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        shape = (*self.shape[:-1], self.shape[-1] // block_elements * block_bytes)
        size = int(np.prod(shape, dtype=np.int64))
        if start + self.offset + size > len(data):
            return None
        stored = np.frombuffer(data, np.uint8, count=size, offset=start + self.offset).reshape(shape)
        return StoredTensor(self.name, kind.name, self.shape, stored)
