"""The safetensors container: an 8-byte length, a JSON header, the tensors' bytes. Read and written without torch."""

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.profiles.errors import InputError

DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F4": 4,
}  # fmt: skip

# In a folder whose weights stayed elsewhere: {file name: safetensors header}, what `read_header` would have read.
REMOTE_HEADERS = "remote_headers.json"

# A header longer than this is refused by the safetensors library too.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header declares it. `dtype` in safetensors' own words: "BF16", "F8_E4M3", "I32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str  # name of the file inside the checkpoint's folder

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors that `path` declares. Raises InputError when it is cut short or no safetensors file."""
    return read_places(path)[0]


def read_places(path: Path) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """`read_header`, and at which byte of the file each tensor begins."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise InputError(f"{path}: no safetensors file ({size:,} bytes)")
        raw = file.read(length)
    if len(raw) < length:
        raise InputError(f"{path}: cut short inside its header ({size:,} bytes)")
    try:
        header = json.loads(raw)
        offsets = {name: entry["data_offsets"] for name, entry in _entries(header).items()}
        end = 8 + length + max((stop for _, stop in offsets.values()), default=0)
        tensors = parse_header(header, path.name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: its safetensors header cannot be read ({error})") from None
    if end != size:
        problem = "cut short" if size < end else "longer than its header says"
        raise InputError(f"{path}: {problem}: {size:,} bytes, and its header describes {end:,}; fetch it again")
    return tensors, {name: 8 + length + begin for name, (begin, _) in offsets.items()}


def parse_header(header: dict[str, Any], file: str) -> dict[str, TensorInfo]:
    tensors = {}
    for name, entry in _entries(header).items():
        begin, end = entry["data_offsets"]
        tensors[name] = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), end - begin, file)
    return tensors


def _entries(header: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * DTYPE_BITS[dtype] // 8


def header_of(tensors: Iterable[TensorInfo]) -> dict[str, Any]:
    """The header of a file that holds `tensors` one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    return header


def write_file(path: Path, tensors: Iterable[TensorInfo], chunks: Iterator[bytes]) -> None:
    """Write `tensors` in this order from `chunks`, whose lengths must add up to theirs; nothing else is held."""
    header = header_of(tensors)
    end = max((entry["data_offsets"][1] for entry in _entries(header).values()), default=0)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        written = sum(file.write(chunk) for chunk in chunks)
    if written != end:
        raise ValueError(f"{path}: {written} bytes of tensors written, {end} declared")
