"""Who can compute a quantization beside our own pipeline, by the name of `--backend`. Importing it is cheap: no torch.

Of every backend the command asks in this order: `check(plan, device)` in the first second, `settings(method)` for the
report, `layers(...)` for the work. What `layers` yields is written and verified like what our own methods yield.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.progress import Progress, silent
from llmq.quantize.backends.libraries import AUTOAWQ, AUTOGPTQ, ArchivedLibrary

if TYPE_CHECKING:
    import torch

    from llmq.quantize.calibration import CalibrationSet
    from llmq.quantize.layer_result import LayerResult
    from llmq.quantize.preflight import Plan


OWN = "llmq"  # the backend that is none: our pipeline and our methods


class Backend(Protocol):
    name: str
    methods: tuple[str, ...]  # the first is what `--backend NAME` means without a method
    default_format: str  # what `--format` is unless asked otherwise

    def check(self, plan: "Plan", device: str) -> None:
        """Refuse what cannot be, as InputError or FailedError. device: as in `--device`. Makes no file."""
        ...

    def settings(self, method: str) -> dict[str, Any]:
        """What the report says of the method's own numbers, and who computed it."""
        ...

    def layers(
        self, plan: "Plan", calibration: "CalibrationSet | None", device: "torch.device", progress: Progress = silent
    ) -> "Iterator[LayerResult]": ...


@dataclass(frozen=True)
class LlmCompressor:
    """llm-compressor in this process: one result a linear, all of them at the end."""

    name: str = "llmcompressor"
    methods: tuple[str, ...] = ("gptq", "smoothquant", "fp8")
    default_format: str = "compressed-tensors"

    def check(self, plan: "Plan", device: str) -> None:
        if importlib.util.find_spec("llmcompressor") is None:
            raise FailedError(
                f"--{plan.recipe.method} needs llmcompressor, not installed here: pip install 'llmq-toolkit[quantize]'"
            )
        architecture = plan.source.architecture
        if architecture.family is not None and architecture.family.experts is not None:
            raise InputError(
                f"--{plan.recipe.method}: llm-compressor sees the experts of a {architecture.model_type} fused into "
                "one, where they are stored one by one; --gptq, --awq and --rtn quantize them"
            )

    def settings(self, method: str) -> dict[str, Any]:
        from llmq.quantize.backends import llmcompressor

        return llmcompressor.SETTINGS[method]

    def layers(
        self, plan: "Plan", calibration: "CalibrationSet | None", device: "torch.device", progress: Progress = silent
    ) -> "Iterator[LayerResult]":
        from llmq.quantize.backends import llmcompressor

        return llmcompressor.layers(plan, calibration, device, progress)


@dataclass(frozen=True)
class Archived:
    """A library that runs in an environment of its own: one result a decoder layer, all of them at the end."""

    library: ArchivedLibrary
    default_format: str

    @property
    def name(self) -> str:
        return self.library.name

    @property
    def methods(self) -> tuple[str, ...]:
        return (self.library.method,)

    def check(self, plan: "Plan", device: str) -> None:
        self.library.check(plan, device)

    def settings(self, method: str) -> dict[str, Any]:
        pinned = [line for line in self.library.environment.requirements.splitlines() if not line.startswith("#")]
        return {**self.library.settings, "backend": self.library.title, "versions": dict(p.split("==") for p in pinned)}

    def layers(
        self, plan: "Plan", calibration: "CalibrationSet | None", device: "torch.device", progress: Progress = silent
    ) -> "Iterator[LayerResult]":
        from llmq.quantize.backends import archived

        return archived.layers(self.library, plan, calibration, device, progress)


BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (LlmCompressor(), Archived(AUTOAWQ, "awq"), Archived(AUTOGPTQ, "gptq"))
}


def backend_named(name: str) -> Backend:
    """The backend called `name`. Raises InputError with the names there are."""
    if name not in BACKENDS:
        raise InputError(f"--backend {name}: {OWN} (our own), {', '.join(BACKENDS)} are the choices")
    return BACKENDS[name]
