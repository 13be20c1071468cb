"""The model that guesses for another: found, or made of it."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.cli import console
from llmq.profiles.cache import cache_dir, locked
from llmq.profiles.checkpoint import find_model, read_checkpoint

if TYPE_CHECKING:
    from llmq.runtime.config import EngineConfig

_BITS = {"w3": 3, "w4": 4}


def with_drafter(engine: "EngineConfig", draft_model: str | None, draft_quant: str | None) -> "EngineConfig":
    """`engine`, whose model is known, with the folder of what guesses for it. Raises InputError."""
    import msgspec

    if draft_model is None and draft_quant is None:
        return engine
    if engine.speculation.method in ("eagle", "medusa"):
        folder = Path(draft_model)
    elif draft_model is not None:
        with console.progress() as progress:
            folder = find_model(draft_model, keep_blocks=True, progress=progress)
    else:
        folder = quantized_copy(Path(engine.model), draft_quant)
    speculation = msgspec.structs.replace(engine.speculation, draft_model=str(folder))
    return msgspec.structs.replace(engine, speculation=speculation)


def quantized_copy(model: Path, scheme: str) -> Path:
    """The model with plainly rounded weights, from the cache or into it."""
    from llmq.quantize.pipeline import quantize_model
    from llmq.quantize.preflight import preflight
    from llmq.quantize.recipe_file import build_recipe

    source = read_checkpoint(model)
    folder = quantized_folder(model, scheme)
    with locked(folder):
        if not folder.is_dir():
            console.status(f"llmq: making a drafter of {model} in {folder}")
            recipe = build_recipe({}, {"method": "rtn", "bits": _BITS[scheme]})
            with console.progress() as progress:
                quantize_model(preflight(source, recipe, folder), progress=progress)
    return folder


def quantized_folder(model: Path, scheme: str) -> Path:
    """Where the copy of a model's folder is, once it is made."""
    return cache_dir() / "drafters" / f"{model.name}-{scheme}-{_identity(model)}"


def _identity(model: Path) -> str:
    """Of a folder's weights and config, by what tells a changed file without reading it."""
    files = sorted((*model.glob("*.safetensors"), model / "config.json"))
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
