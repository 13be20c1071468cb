"""A GGUF file as a Hugging Face folder in llmq's cache: made once, whole or not at all, then reused.

Its tensors are bf16, or the linears stay in the file's own blocks (`keep_blocks`), for the runtime to multiply by.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmq.profiles.cache import cache_dir, locked, require_free_space, whole_folder
from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.gguf_blocks import BLOCK_TYPES
from llmq.profiles.gguf_config import generation_config, model_config
from llmq.profiles.gguf_file import read_gguf_file
from llmq.profiles.gguf_tokenizer import write_tokenizer
from llmq.profiles.gguf_weights import GGUFTensor, Written, in_bf16, in_blocks, list_tensors
from llmq.profiles.progress import Progress, silent
from llmq.profiles.safetensors_file import REMOTE_HEADERS, header_of, write_file

# Part of the cache key: raise it when a conversion comes out differently, so that old results are made anew.
CONVERTER = 2
_BLOCKS = 1  # likewise, of folders that keep blocks
_SHARD_BYTES = 5 * 10**9


def converted(source: Path, progress: Progress = silent, keep_blocks: bool = False) -> Path:
    """The folder of `source`, converted now if it was not yet. Raises InputError for what it cannot convert exactly."""
    target = _target(source, keep_blocks)
    with locked(target):
        if not target.exists():
            with whole_folder(target) as folder:
                convert(source, folder, progress, keep_blocks)
    return target


def config_only(source: Path, keep_blocks: bool = False) -> Path:
    """The folder of `source` when it is converted already, else one with everything but the weights, which says what
    tensors those would be."""
    full = _target(source, keep_blocks)
    if full.exists():
        return full
    target = full.with_name(full.name + "-config")
    with locked(target):
        if not target.exists():
            with whole_folder(target) as folder:
                gguf = _GGUF(source, keep_blocks)
                _write_small_files(gguf, folder)
                _write_json(folder / REMOTE_HEADERS, {"model.safetensors": header_of(one.info for one in gguf.written)})
    return target


def _target(source: Path, keep_blocks: bool) -> Path:
    kind = f"-blocks{_BLOCKS}" if keep_blocks else ""
    return cache_dir() / "gguf" / f"{source.stem}-{_fingerprint(source)}{kind}"


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


def convert(source: Path, folder: Path, progress: Progress = silent, keep_blocks: bool = False) -> None:
    """Write the Hugging Face folder of `source` into the empty `folder`: config, tokenizer, template, weights."""
    gguf = _GGUF(source, keep_blocks)
    require_free_space(folder, sum(one.info.num_bytes for one in gguf.written), f"the copy of {source.name}")
    _write_small_files(gguf, folder)
    _write_weights(gguf.written, folder, progress)


def _fingerprint(source: Path) -> str:
    """Of the file's size and time: reading a large file for its hash would cost more than opening it."""
    stat = source.stat()
    return hashlib.sha256(f"{CONVERTER} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]


def _write_small_files(gguf: "_GGUF", folder: Path) -> None:
    write_tokenizer(gguf.fields, folder, gguf.config["max_position_embeddings"])
    _write_json(folder / "generation_config.json", generation_config(gguf.fields))
    _write_json(folder / "config.json", gguf.config)


class _GGUF:
    """An open GGUF: its metadata, its tensors under their new names, what is written of them, and the config.json."""

    def __init__(self, source: Path, keep_blocks: bool = False) -> None:
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
        write = in_blocks if keep_blocks else in_bf16
        self.written = [one for tensor in self.tensors for one in write(tensor)]
        if keep_blocks and (types := _types_kept(self.tensors)):
            self.config["quantization_config"] = {"quant_method": "gguf", "modules": types}


def _types_kept(tensors: list[GGUFTensor]) -> dict[str, str]:
    """Linear -> GGUF type, of those that stay in their blocks."""
    return {
        tensor.info.name.removesuffix(".weight"): tensor.source.type_name
        for tensor in tensors
        if tensor.is_linear and tensor.source.type_name in BLOCK_TYPES
    }


def _write_weights(tensors: list[Written], folder: Path, progress: Progress) -> None:
    shards = _shards(tensors)
    total = sum(tensor.info.num_bytes for tensor in tensors)
    done = 0

    def chunks(shard: list[Written]) -> Iterator[bytes]:
        nonlocal done
        for tensor in shard:
            for chunk in tensor.chunks():
                yield chunk
                done += len(chunk)
                progress("converting GGUF", done, total, unit="B")

    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, [tensor.info for tensor in shard], chunks(shard))
        weight_map.update({tensor.info.name: name for tensor in shard})
    if len(shards) > 1:
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _shards(tensors: list[Written]) -> list[list[Written]]:
    shards: list[list[Written]] = [[]]
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
