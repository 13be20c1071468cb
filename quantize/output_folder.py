"""OUT: a model folder that appears whole or not at all."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from llmq.profiles.errors import FailedError

MAX_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"
# Files of the source that describe or are its weights: OUT has its own.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OWN_FILES = ("config.json", _INDEX, "pytorch_model.bin.index.json", "remote_headers.json", "quantization_report.json")


@contextlib.contextmanager
def appearing_whole(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, flushed to disk and renamed to it when the block ends, removed when it raises.

    A killed process leaves the hidden folder only, which the next run removes.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            _flush(path)
        try:
            os.replace(partial, out)  # onto a missing or an empty folder
        except OSError as error:
            raise FailedError(
                f"{out} was made by somebody else meanwhile ({error.strerror}): nothing was written"
            ) from None
        _flush(out.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # safetensors wraps the system's error and keeps its words only.
        if isinstance(error, Exception) and os.strerror(errno.ENOSPC) in str(error):
            raise FailedError(f"{out.parent} is full: nothing was written") from None
        raise


def _remove_leftovers(out: Path) -> None:
    for folder in out.parent.glob(f".{out.name}.partial-*"):
        pid = folder.name.rsplit("-", 1)[1]
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy every file of a model folder but its weights and config: tokenizer, chat template, generation config."""
    copied = []
    for path in sorted(source.iterdir()):
        is_own = path.suffix in _WEIGHT_SUFFIXES or path.name in _OWN_FILES or path.name.startswith(".")
        if path.is_file() and not is_own:
            shutil.copyfile(path, target / path.name)  # contents only: the source may be read-only
            copied.append(path.name)
    return copied


class ShardWriter:
    """Writes tensors as they come into safetensors files of bounded size, holding at most one file's in memory."""

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        self.num_bytes = 0
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._shards: list[list[str]] = []  # names in each file written

    def add(self, name: str, tensor: Tensor) -> None:
        if self._held and self._held_bytes + tensor.nbytes > self.max_shard_bytes:
            self._write()
        # A view of a larger tensor would be refused, or share its storage with another name.
        self._held[name] = tensor.detach().to("cpu").contiguous().clone()
        self._held_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is held, give the files their names and, for more than one, the index."""
        if self._held:
            self._write()
        count = len(self._shards)
        if count == 1:
            os.replace(self._part(0), self.folder / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file_name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self._part(number), self.folder / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self.folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")

    def _write(self) -> None:
        part = self._part(len(self._shards))
        save_file(self._held, part, metadata={"format": "pt"})
        # safetensors makes files that their owner alone can read; the folder has the user's own umask.
        part.chmod(self.folder.stat().st_mode & 0o666)
        self._shards.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"
