"""What loading made of a checkpoint's weights, kept on disk and memory-mapped the next time."""

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmq.profiles.cache import cache_dir, locked, try_lock
from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.units import format_bytes

# The file: a page that holds _MAGIC, where the header begins and how long it is (8 bytes each, little-endian) and its
# SHA-256; the tensors, each on a cache line; on a page the header, in JSON.
_MAGIC = b"llmq packed weights 2\n"
_PAGE, _LINE = 4096, 64
_DIGEST_BYTES = 32
_BEFORE_DIGEST = len(_MAGIC) + 16
# Of a file that is being written so much is mapped at once, or a whole entry.
_WINDOW_BYTES = 256 << 20
# Of weights that are only summed.
_PIECE_BYTES = 16 << 20
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

    It lies beside the weights, or where nothing can be written there, in llmq's cache. An entry is written as soon as
    it is added, and mapped from there: memory holds one of them beside what the file does. The file is renamed into
    place when it is whole, so that a process that is killed leaves the former one, which stays whoever's that has
    mapped it.
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
        self._added: dict[str, PackedEntry] = {}  # of which no file is written, yet
        self._writer: _Writer | None = None
        self._why_not = ""  # there will be no file
        self.said = ""  # for people: where they were found or are kept now, or why not
        for path in self._places:
            entries = self._read(path)
            if entries is not None:
                self._found, self.said = entries, f"from {path}"
                break

    def find(self, name: str) -> PackedEntry | None:
        return self._found.get(name)

    def add(self, name: str, entry: PackedEntry) -> PackedEntry:
        """An entry that was not found. Returns it as it was written, mapped, or itself where it is not."""
        self._added[name] = entry
        if self._writer is None and not self._why_not and _num_bytes(self._added) >= _LEAST_BYTES:
            self._writer = self._begin()
        if self._writer is None:
            return entry
        try:
            for other, one in self._added.items():
                kept = self._writer.add(other, one)
        except OSError as error:
            self._give_up(error)
            return entry
        self._added = {}
        return kept

    def save(self) -> None:
        """Make what was added, and what was found, the file, where that was worth one."""
        writer = self._writer
        if writer is not None:
            try:
                for name, entry in self._found.items():
                    writer.add(name, entry)
                content = _content(self._checkpoint)
                if _files(self._checkpoint) != self._files:
                    raise OSError("the weights were changed while they were read")
                files = self._files if _are_settled(self._files) else None
                writer.finish({"key": self._key, "files": files, "content": content})
                self.said = f"kept in {writer.path}, {format_bytes(writer.num_bytes)}"
            except OSError as error:
                self._give_up(error)
        if self._why_not:
            self.said = f"not kept ({self._why_not})"
        self.close()

    def close(self) -> None:
        """Leave no file that is not whole."""
        if self._writer is not None:
            self._writer.close()
        self._writer, self._added = None, {}

    def _begin(self) -> "_Writer | None":
        num_bytes, why_not = sum(size for size, _, _ in self._files.values()), ""
        for path in self._places:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(path.parent).free < 2 * num_bytes:
                    raise OSError(f"the weights' {format_bytes(num_bytes)} are more than half of what is free")
                return _Writer(path)
            except OSError as error:
                why_not = why_not or f"{path.parent}: {error.strerror or error}"
        self._why_not = why_not
        return None

    def _give_up(self, error: OSError) -> None:
        self._why_not = f"{self._writer.path.parent}: {error.strerror or error}"
        self.close()

    def _read(self, path: Path) -> dict[str, PackedEntry] | None:
        """Of a file that is whole and of these weights. Whatever is wrong with it, it is no reason to fail."""
        try:
            with open(path, "rb") as file:
                mapped = _mapped(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            first = mapped[: _BEFORE_DIGEST + _DIGEST_BYTES].numpy().tobytes()
            begin, size = (int.from_bytes(first[-_DIGEST_BYTES - 8 * n :][:8], "little") for n in (2, 1))
            if not first.startswith(_MAGIC) or begin + size != len(mapped):
                return None
            encoded = mapped[begin:].numpy().tobytes()
            if hashlib.sha256(encoded).digest() != first[-_DIGEST_BYTES:]:
                return None
            header, data = json.loads(encoded), mapped[:begin]
            if header["key"] != self._key or not self._is_of_these_weights(header):
                return None
            if checksum([data[_PAGE:]]) != header["checksum"]:
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


class _Writer:
    """A file that grows by entries; nobody sees it before `finish`. Raises OSError where it cannot."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_bytes = path, 0  # of tensors
        self._end = _PAGE
        self._places: dict[str, Any] = {}
        self._windows: list[tuple[int, Tensor]] = []  # where it begins in the file, the mapping
        # Under a name of its own, for others may pack the same weights now.
        self._partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        with locked(path):
            self._remove_what_killed_processes_left()
            self._file = open(self._partial, "x+b")  # noqa: SIM115
            try_lock(self._file)

    def add(self, name: str, entry: PackedEntry) -> PackedEntry:
        places = {}
        begin = self._end
        for key, tensor in entry.tensors.items():
            self._end = -(-self._end // _LINE) * _LINE
            places[key] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._end]
            self._file.seek(self._end)
            self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            self._end += tensor.nbytes
            self.num_bytes += tensor.nbytes
        self._file.flush()
        self._places[name] = {"facts": entry.facts, "tensors": places}
        first, window = self._window_of(begin)
        return PackedEntry(
            entry.facts, {key: _tensor(window, kind, shape, at - first) for key, (kind, shape, at) in places.items()}
        )

    def finish(self, header: dict[str, Any]) -> None:
        begin = -(-self._end // _PAGE) * _PAGE
        os.ftruncate(self._file.fileno(), begin)
        firsts = [first for first, _ in self._windows]
        windows = zip(self._windows, [*firsts[1:], begin], strict=True)
        header |= {"entries": self._places, "checksum": checksum(window[: end - at] for (at, window), end in windows)}
        encoded = json.dumps(header).encode()
        self._file.seek(begin)
        self._file.write(encoded)
        self._file.seek(0)
        where = begin.to_bytes(8, "little") + len(encoded).to_bytes(8, "little")
        self._file.write(_MAGIC + where + hashlib.sha256(encoded).digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        with locked(self.path):
            os.replace(self._partial, self.path)

    def close(self) -> None:
        """What was mapped stays so."""
        with contextlib.suppress(OSError):  # a full disk, told again
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def _window_of(self, begin: int) -> tuple[int, Tensor]:
        """(where it begins in the file, a mapping) of what was written from `begin` on."""
        if not self._windows or self._windows[-1][0] + len(self._windows[-1][1]) < self._end:
            first = begin // _PAGE * _PAGE
            end = max(self._end, first + _WINDOW_BYTES)
            os.ftruncate(self._file.fileno(), end)
            self._windows.append((first, _mapped(self._file.fileno(), first, end - first)))
        return self._windows[-1]

    def _remove_what_killed_processes_left(self) -> None:
        for partial in self.path.parent.glob(f".{self.path.name}.*partial"):
            with contextlib.suppress(OSError), open(partial, "rb") as file:
                if try_lock(file):
                    partial.unlink()


def checksum(pieces: Iterable[Tensor]) -> str:
    """Of uint8 pieces one behind the other, all but the last of whole pages: the SHA-256 of the sums of its pages, so
    that it costs little more than reading."""
    digest = hashlib.sha256()
    for data in pieces:
        whole = len(data) // _PAGE * _PAGE
        words = data[:whole].view(torch.int64).view(-1, _PAGE // 8)
        digest.update(words.sum(dim=1).numpy().tobytes())
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
    return {name: checksum(_pieces(checkpoint.path / name)) for name in _files(checkpoint)}


def _pieces(path: Path) -> Iterator[Tensor]:
    """A file, one piece of it in memory at a time."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for begin in range(0, size, _PIECE_BYTES):
            yield _mapped(file.fileno(), begin, min(_PIECE_BYTES, size - begin))


def _mapped(descriptor: int, begin: int, num_bytes: int) -> Tensor:
    """uint8 [num_bytes] of a file from a page's `begin` on, a private mapping. In large pages where the system has them
    for files: fewer bytes a second come through small ones."""
    mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, offset=begin)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _num_bytes(entries: Mapping[str, PackedEntry]) -> int:
    return sum(tensor.nbytes for entry in entries.values() for tensor in entry.tensors.values())


def _tensor(data: Tensor, dtype: str, shape: list[int], begin: int) -> Tensor:
    kind = getattr(torch, dtype)
    return data[begin : begin + torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
