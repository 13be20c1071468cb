"""The record of an evaluation: the numbers, and everything that decided them."""

import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from llmq.profiles.errors import InputError
from llmq.runtime.frontend.chat_template import read_chat_template
from llmq.runtime.request import EngineInfo

SCHEMA = "llmq.eval/1"

_NUM_PIECES = 64
_PIECE_BYTES = 16 * 1024
# What transformers writes into tokenizer.json when it was last used, and what changes no id of a single text.
_RUN_STATE = ("truncation", "padding")


def checkpoint_sha256(folder: Path) -> str:
    """Identity of a checkpoint: over config.json, and of every safetensors file its name, size, header and 64 pieces.

    The pieces (16 KiB each, evenly spaced) make a checkpoint quantized anew another one, without reading all of it.
    """
    digest = hashlib.sha256(_canonical(_load(folder / "config.json")))
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            digest.update(file.read(header_bytes))
            for piece in range(_NUM_PIECES):
                file.seek(8 + header_bytes + (size - 8 - header_bytes) * piece // _NUM_PIECES)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def tokenizer_sha256(folder: Path) -> str:
    """Identity of a tokenizer by content: its layout on disk and its last truncation setting do not count."""
    content = _load(folder / "tokenizer.json")
    for name in _RUN_STATE:
        content.pop(name, None)
    return hashlib.sha256(_canonical(content)).hexdigest()


def identify_checkpoint(folder: Path) -> dict[str, str | None]:
    """What of a folder decides the tokens that come out, as hashes; None for a chat template that is not there."""
    settings = folder / "tokenizer_config.json"
    template = read_chat_template(folder, _load(settings) if settings.is_file() else {})
    return {
        "sha256": checkpoint_sha256(folder),
        "tokenizer_sha256": tokenizer_sha256(folder),
        "chat_template_sha256": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    }


def describe_model(folder: Path, info: EngineInfo) -> dict[str, Any]:
    """Which checkpoint was evaluated, and on what numerics."""
    return {
        "path": str(folder),
        **identify_checkpoint(folder),
        "weight_bytes": info.weight_bytes,
        "vocab_size": info.vocab_size,
        "max_model_len": info.max_model_len,
        "fingerprint": dict(info.fingerprint),
    }


def new_record() -> dict[str, Any]:
    packages = ("llmq-toolkit", "torch", "tokenizers")
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}},
    }


def check_output_path(path: Path) -> None:
    """Refuses, before any work, an `-o` that could not be written at the end."""
    if path.is_dir():
        raise InputError(f"-o {path} is a folder: name a file in it")
    if not path.absolute().parent.is_dir():
        raise InputError(f"-o {path}: there is no folder {path.absolute().parent}")


def save_record(record: dict[str, Any], path: Path) -> None:
    """Written whole or not at all."""
    with whole_file(path) as file:
        file.write(json.dumps(plain_json(record), indent=2, ensure_ascii=False) + "\n")


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A new text file that is `path` when the block ends, and not there when it raises."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def plain_json(value: Any) -> Any:
    """Only what JSON has: a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _load(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
