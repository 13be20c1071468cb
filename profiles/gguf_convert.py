"""A GGUF file as a bf16 Hugging Face folder in llmq's cache: made once, whole or not at all, then reused."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmq.profiles.cache import cache_dir, locked, require_free_space, whole_folder
from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.gguf_config import generation_config, model_config
from llmq.profiles.gguf_file import read_gguf_file
from llmq.profiles.gguf_tokenizer import write_tokenizer
from llmq.profiles.gguf_weights import GGUFTensor, bf16_chunks, list_tensors
from llmq.profiles.progress import Progress, silent
from llmq.profiles.safetensors_file import write_file

# Part of the cache key: raise it when a conversion comes out differently, so that old results are made anew.
CONVERTER = 2
_SHARD_BYTES = 5 * 10**9


def converted(source: Path, progress: Progress = silent) -> Path:
    """The folder of `source`, converted now if it was not yet. Raises InputError for what it cannot convert exactly."""
    target = cache_dir() / "gguf" / f"{source.stem}-{_fingerprint(source)}"
    with locked(target):
        if not target.exists():
            with whole_folder(target) as folder:
                convert(source, folder, progress)
    return target


def config_only(source: Path) -> Path:
    """The folder of `source` when it is converted already, else one with everything but the weights."""
    full = cache_dir() / "gguf" / f"{source.stem}-{_fingerprint(source)}"
    if full.exists():
        return full
    target = full.with_name(full.name + "-config")
    with locked(target):
        if not target.exists():
            with whole_folder(target) as folder:
                _write_small_files(_GGUF(source), folder)
    return target


def read_gguf(source: Path) -> Checkpoint:
    """What `source` itself holds, before any conversion: its own types and sizes under Hugging Face names."""
    gguf = _GGUF(source)
    tensors = {
        tensor.info.name: replace(
            tensor.info,
            dtype=tensor.source.type_name,
            num_bytes=tensor.source.num_bytes,
            file=source.name,
        )
        for tensor in gguf.tensors
    }
    return Checkpoint(source, gguf.config, tensors, None)


def convert(source: Path, folder: Path, progress: Progress = silent) -> None:
    """Write the Hugging Face folder of `source` into the empty `folder`: config, tokenizer, template, bf16 weights."""
    gguf = _GGUF(source)
    require_free_space(folder, sum(tensor.info.num_bytes for tensor in gguf.tensors), f"the bf16 copy of {source.name}")
    _write_small_files(gguf, folder)
    _write_weights(gguf.tensors, folder, progress)


def _fingerprint(source: Path) -> str:
    """Of the file's size and time: reading a large file for its hash would cost more than opening it."""
    stat = source.stat()
    return hashlib.sha256(f"{CONVERTER} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]


def _write_small_files(gguf: "_GGUF", folder: Path) -> None:
    write_tokenizer(gguf.fields, folder, gguf.config["max_position_embeddings"])
    _write_json(folder / "generation_config.json", generation_config(gguf.fields))
    _write_json(folder / "config.json", gguf.config)


class _GGUF:
    """An open GGUF: its metadata, its tensors under their new names, and the config.json that describes them."""

    def __init__(self, source: Path) -> None:
        file = read_gguf_file(source)
        self.fields = file.fields
        arch = str(self.fields.get("general.architecture"))
        heads = self.fields.get(f"{arch}.attention.head_count", 1)
        self.tensors = list_tensors(
            file.tensors, arch, heads, self.fields.get(f"{arch}.attention.head_count_kv", heads)
        )
        factors = [tensor.data.view(np.float32) for tensor in file.tensors if tensor.name == "rope_freqs.weight"]
        shapes = {tensor.info.name: tensor.info.shape for tensor in self.tensors}
        self.config = model_config(self.fields, shapes, factors[0] if factors else None)


def _write_weights(tensors: list[GGUFTensor], folder: Path, progress: Progress) -> None:
    shards = _shards(tensors)
    total = sum(tensor.info.num_bytes for tensor in tensors)
    done = 0

    def chunks(shard: list[GGUFTensor]) -> Iterator[bytes]:
        nonlocal done
        for tensor in shard:
            for chunk in bf16_chunks(tensor):
                yield chunk
                done += len(chunk)
                progress("converting GGUF to bf16", done, total, unit="B")

    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, [tensor.info for tensor in shard], chunks(shard))
        weight_map.update({tensor.info.name: name for tensor in shard})
    if len(shards) > 1:
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _shards(tensors: list[GGUFTensor]) -> list[list[GGUFTensor]]:
    shards: list[list[GGUFTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.info.num_bytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.info.num_bytes
    return shards


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
