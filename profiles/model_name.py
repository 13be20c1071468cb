"""What a user means by MODEL: decided from the text and the file system alone, without a network."""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmq.profiles.errors import InputError

ALIASES = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelName:
    kind: Literal["folder", "config", "gguf", "alias", "hub"]
    name: str
    path: Path = Path()  # of a folder or a file


def parse_model_name(name: str) -> ModelName:
    """Raises InputError for a path that is not there, naming the nearest that is."""
    if not name.strip():
        raise InputError("MODEL is empty: give a folder, a .gguf file, a hub id (org/name) or smollm2-135m")
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(name, path)
    if path.is_file():
        return _file(name, path)
    if name in ALIASES:
        return ModelName("alias", name)
    if _is_path(name, path):
        raise InputError(f"no such {'file' if path.suffix == '.gguf' else 'folder'} {name}{_did_you_mean(name, path)}")
    return ModelName("hub", name)


def _folder(name: str, path: Path) -> ModelName:
    if not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelName("gguf", name, ggufs[0])
        if ggufs:
            raise InputError(
                f"{name} holds {len(ggufs)} GGUF files; name one of {', '.join(f.name for f in ggufs[:5])}"
            )
    return ModelName("folder", name, path)


def _file(name: str, path: Path) -> ModelName:
    if path.suffix == ".gguf":
        return ModelName("gguf", name, path)
    if path.suffix == ".json":
        return ModelName("config", name, path)
    raise InputError(f"{name} is a file, and not a .gguf; give the folder that holds the model")


def _is_path(name: str, path: Path) -> bool:
    """Whether a name that is not on this disk was meant to be: then it is a typo, never a hub id."""
    if name.startswith((".", "~", os.sep)) or path.suffix in (".gguf", ".json") or not _HUB_ID.fullmatch(name):
        return True
    return path.parent.is_dir()  # `models/smoll` beside an existing folder `models`


def _did_you_mean(name: str, path: Path) -> str:
    """` (did you mean ./smol?)`: the nearest folder beside the missing one, or the nearest alias for a bare name."""
    parent = path.parent
    if not parent.is_dir():
        return f" (there is no folder {parent} either)"
    prefix = name[: len(name) - len(path.name)] if name.endswith(path.name) else f"{parent}{os.sep}"
    candidates = {f"{prefix}{entry.name}": entry.name for entry in parent.iterdir() if _is_model(entry)}
    if "/" not in name:
        candidates.update({alias: alias for alias in ALIASES})
    near = difflib.get_close_matches(path.name, candidates.values(), n=1, cutoff=0.6)
    if near:
        return f" (did you mean {next(full for full, short in candidates.items() if short == near[0])}?)"
    return "" if "/" in name else f" (a hub id is org/name; the aliases are {', '.join(ALIASES)})"


def _is_model(entry: Path) -> bool:
    return entry.suffix == ".gguf" or (entry.is_dir() and not entry.name.startswith("."))
