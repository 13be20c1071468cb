"""What loading made of a checkpoint's weights, kept on disk and memory-mapped the next time."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmq.profiles.cache import cache_dir, locked
from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.units import format_bytes

# The file: _MAGIC, bytes of the header (8, little-endian), its SHA-256, the header in JSON, zeros up to a page, and the
# tensors, each on a cache line.
_MAGIC = b"llmq packed weights 1\n"
_PAGE, _LINE = 4096, 64
_DIGEST_BYTES = 32
FOLDER = ".llmq"  # beside the weights
# What takes a tenth of a second to pack is not worth a file.
_LEAST_BYTES = 16 << 20


@dataclass(frozen=True)
class PackedEntry:
    """`facts` are what JSON can hold."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


class PackedCache:
    """Entries by name, of one checkpoint under one set of `settings`: those of an earlier load, and new ones.

    A file is believed when all of it is as it was written and it was made of these very weights: of files with the same
    names, sizes and times of change (or, in a copied folder, with the same bytes), under equal settings and by equal
    code. Else it is made anew.

    It lies beside the weights, or where nothing can be written there, in llmq's cache. It is renamed into place when it
    is whole, so that a process that is killed leaves the former one, and whoever has mapped that keeps it.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Mapping[str, str], code: str) -> None:
        """settings: what packing depends on beside the checkpoint; files of other settings are kept apart. code: the
        version of what packs."""
        self._checkpoint = checkpoint
        self._files = _files(checkpoint)  # before any weight is read
        self._key = {"config": _digest(json.dumps([checkpoint.config, checkpoint.quantization], sort_keys=True))}
        self._key |= {"code": code, **settings}
        name = f"packed-{_digest(json.dumps(settings, sort_keys=True))[:12]}.bin"
        elsewhere = cache_dir() / "packed" / _digest(str(checkpoint.path.resolve()))[:16]
        self._places = [checkpoint.path / FOLDER / name, elsewhere / name]
        self._found: dict[str, PackedEntry] = {}
        self._added: dict[str, PackedEntry] = {}
        self.said = ""  # for people: where they were found or are kept now, or why not
        for path in self._places:
            entries = self._read(path)
            if entries is not None:
                self._found, self.said = entries, f"from {path}"
                break

    def find(self, name: str) -> PackedEntry | None:
        return self._found.get(name)

    def add(self, name: str, entry: PackedEntry) -> None:
        """An entry that was not found. Its tensors are kept in memory until `save`."""
        self._added[name] = entry

    def save(self) -> None:
        """Write a file of all entries, where some were not found and they are not small."""
        entries = self._found | self._added
        num_bytes = sum(tensor.nbytes for entry in entries.values() for tensor in entry.tensors.values())
        if not self._added or num_bytes < _LEAST_BYTES:
            return
        why_not = ""
        for path in self._places:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(path.parent).free < 2 * num_bytes:
                    raise OSError(f"its {format_bytes(num_bytes)} are more than half of what is free")
                with locked(path):
                    self._write(path, entries)
            except OSError as error:
                why_not = why_not or f"{path.parent}: {error.strerror or error}"
                continue
            self.said = f"kept in {path}, {format_bytes(num_bytes)}"
            break
        else:
            self.said = f"not kept ({why_not})"
        self._added = {}

    def _write(self, path: Path, entries: Mapping[str, PackedEntry]) -> None:
        places, end = _places_of(entries)
        content = _content(self._checkpoint)
        if _files(self._checkpoint) != self._files:
            raise OSError("the weights were changed while they were read")
        header = {
            "key": self._key,
            "files": self._files if _are_settled(self._files) else None,
            "content": content,
            "entries": places,
            "num_bytes": end,
            "checksum": "0" * 2 * _DIGEST_BYTES,
        }
        start = _start_of(json.dumps(header).encode())
        partial = path.with_name(f".{path.name}.partial")
        try:
            with open(partial, "wb") as file:
                for name, entry in entries.items():
                    for tensor_name, tensor in entry.tensors.items():
                        file.seek(start + places[name]["tensors"][tensor_name][2])
                        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                file.truncate(start + end)
                file.flush()
                header["checksum"] = checksum(_mapped(partial)[start:])
                encoded = json.dumps(header).encode()
                file.seek(0)
                file.write(_MAGIC + len(encoded).to_bytes(8, "little") + hashlib.sha256(encoded).digest() + encoded)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _read(self, path: Path) -> dict[str, PackedEntry] | None:
        """Of a file that is whole and of these weights. Whatever is wrong with it, it is no reason to fail."""
        try:
            mapped = _mapped(path)
            before = len(_MAGIC) + 8
            if bytes(mapped[: len(_MAGIC)].tolist()) != _MAGIC:
                return None
            size = int.from_bytes(bytes(mapped[len(_MAGIC) : before].tolist()), "little")
            encoded = mapped[before + _DIGEST_BYTES : before + _DIGEST_BYTES + size].numpy().tobytes()
            if hashlib.sha256(encoded).digest() != bytes(mapped[before : before + _DIGEST_BYTES].tolist()):
                return None
            header = json.loads(encoded)
            data = mapped[_start_of(encoded) :]
            is_ours = header["key"] == self._key and len(data) == header["num_bytes"]
            if not is_ours or checksum(data) != header["checksum"] or not self._is_of_these_weights(header):
                return None
            return {
                name: PackedEntry(
                    entry["facts"], {key: _tensor(data, *place) for key, place in entry["tensors"].items()}
                )
                for name, entry in header["entries"].items()
            }
        except (OSError, RuntimeError, ValueError, KeyError, TypeError):
            return None

    def _is_of_these_weights(self, header: dict[str, Any]) -> bool:
        return header["files"] == self._files or header["content"] == _content(self._checkpoint)


def checksum(data: Tensor) -> str:
    """Of uint8 [n]: the SHA-256 of the sums of its pages, so that it costs little more than reading."""
    whole = len(data) // _PAGE * _PAGE
    words = data[:whole].view(torch.int64).view(-1, _PAGE // 8)
    digest = hashlib.sha256(words.sum(dim=1).numpy().tobytes())
    digest.update(data[whole:].numpy().tobytes())
    return digest.hexdigest()


def _files(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Size and times of change of the weights' files. A file's own clock, st_ctime, is nobody's to set."""
    found = {}
    for name in sorted({tensor.file for tensor in checkpoint.tensors.values()}):
        stat = (checkpoint.path / name).stat()
        found[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return found


def _are_settled(files: Mapping[str, list[int]]) -> bool:
    """Whether a change from now on will show in the times: those of file systems tick, at worst each two seconds."""
    return max(change_ns for _, _, change_ns in files.values()) < time.time_ns() - 3_000_000_000


def _content(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: checksum(_mapped(checkpoint.path / name)) for name in _files(checkpoint)}


def _mapped(path: Path) -> Tensor:
    """uint8 [bytes of the file], a private mapping."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _places_of(entries: Mapping[str, PackedEntry]) -> tuple[dict[str, Any], int]:
    """(what the header says of each entry, where the last tensor ends). A tensor's place: dtype, shape, offset."""
    places, end = {}, 0
    for name, entry in entries.items():
        tensors = {}
        for key, tensor in entry.tensors.items():
            begin = -(-end // _LINE) * _LINE
            tensors[key] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), begin]
            end = begin + tensor.nbytes
        places[name] = {"facts": entry.facts, "tensors": tensors}
    return places, end


def _tensor(data: Tensor, dtype: str, shape: list[int], begin: int) -> Tensor:
    kind = getattr(torch, dtype)
    return data[begin : begin + torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)


def _start_of(header: bytes) -> int:
    """Where the tensors begin: on a page."""
    return -(-(len(_MAGIC) + 8 + _DIGEST_BYTES + len(header)) // _PAGE) * _PAGE


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
