"""What a drafter adds to `llmq kv-budget`: its weights, and the K and V that it keeps beside the model's."""

from dataclasses import dataclass
from pathlib import Path

from llmq.cli import console
from llmq.cli.drafter import quantized_folder
from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.checkpoint import find_model, read_config
from llmq.profiles.errors import InputError


@dataclass(frozen=True)
class PlannedDrafter:
    path: Path
    scheme: str | None  # of a copy of the model at `path` that is not made yet; None: as it is stored
    architecture: ModelArchitecture

    @property
    def num_layers(self) -> int:
        return len(self.architecture.attention)


def planned_drafter(model: Path, draft_model: str | None, draft_quant: str | None) -> PlannedDrafter | None:
    """As `serve` takes them; without a weight being read or a copy made. Raises InputError."""
    if draft_model is not None and draft_quant is not None:
        raise InputError("--draft-model and --draft-quant exclude each other: give one of them")
    if draft_quant not in (None, "w3", "w4"):
        raise InputError(f"--draft-quant {draft_quant}: one of w3, w4")
    if draft_model is not None:
        with console.progress() as progress:
            path, scheme = find_model(draft_model, config_only=True, keep_blocks=True, progress=progress), None
    elif draft_quant is not None:
        made = quantized_folder(model, draft_quant) if model.is_dir() else None
        path, scheme = (made, None) if made is not None and made.is_dir() else (model, draft_quant)
    else:
        return None
    return PlannedDrafter(path, scheme, ModelArchitecture.from_config(read_config(path)).require_runnable())
