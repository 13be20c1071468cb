"""OUT: a model folder that appears whole or not at all."""

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmq.profiles.errors import FailedError
from llmq.profiles.progress import Progress, silent
from llmq.profiles.safetensors_file import TensorInfo, write_file
from llmq.quantize.layer_result import flush

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
            flush(path)
        try:
            os.replace(partial, out)  # onto a missing or an empty folder
        except OSError as error:
            raise FailedError(
                f"{out} was made by somebody else meanwhile ({error.strerror}): nothing was written"
            ) from None
        flush(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove_leftovers(out: Path) -> None:
    for folder in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
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


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy every file of a model folder but its weights and config: tokenizer, chat template, generation config."""
    copied = []
    for path in sorted(source.iterdir()):
        is_own = path.suffix in _WEIGHT_SUFFIXES or path.name in _OWN_FILES or path.name.startswith(".")
        if path.is_file() and not is_own:
            shutil.copyfile(path, target / path.name)  # contents only: the source may be read-only
            copied.append(path.name)
    return copied


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to write, read when its turn comes. `info.file` does not matter."""

    info: TensorInfo
    read: Callable[[], Tensor]


def write_tensors(
    folder: Path,
    tensors: Sequence[StoredTensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = silent,
) -> int:
    """Write tensors in this order into safetensors files of bounded size, one tensor in memory at a time.

    One file is model.safetensors; for more there is an index. Returns the bytes of all tensors.
    """
    shards = _shards(tensors, max_shard_bytes)
    total = sum(tensor.info.num_bytes for tensor in tensors)
    done, weight_map = 0, {}

    def content(shard: Sequence[StoredTensor]) -> Iterator[bytes]:
        nonlocal done
        for tensor in shard:
            progress("writing", done, total, unit="B")
            yield _bytes_of(tensor)
            done += tensor.info.num_bytes

    for number, shard in enumerate(shards, 1):
        several = len(shards) > 1
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if several else "model.safetensors"
        write_file(folder / name, [tensor.info for tensor in shard], content(shard))
        weight_map.update({tensor.info.name: name for tensor in shard})
    progress("writing", total, total, unit="B")
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    return total


def _shards(tensors: Sequence[StoredTensor], max_shard_bytes: int) -> list[list[StoredTensor]]:
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.info.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.info.num_bytes
    return shards


def _bytes_of(tensor: StoredTensor) -> bytes:
    value = tensor.read()
    if tuple(value.shape) != tensor.info.shape or value.nbytes != tensor.info.num_bytes:
        raise ValueError(f"{tensor.info.name} is {tuple(value.shape)} {value.dtype}, {tensor.info} was announced")
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data
