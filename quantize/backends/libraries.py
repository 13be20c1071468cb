"""The archived libraries: what each can do, from its own source, and the refusals that follow. No torch here."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.profiles import machine
from llmq.profiles.errors import FailedError, InputError
from llmq.quantize.backends.environment import Environment

if TYPE_CHECKING:
    from llmq.quantize.preflight import Plan


@dataclass(frozen=True)
class ArchivedLibrary:
    """A library that runs in an environment of its own, by a script that is given files and leaves files."""

    name: str  # as in `--backend`
    title: str
    method: str
    ours: str  # what to use instead
    module: str
    model_types: tuple[str, ...]  # decoders whose code in its transformers has the tensors that checkpoints have
    rope_types: tuple[str, ...]  # that its transformers computes
    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    signs: tuple[bool, ...]  # whether symmetric and asymmetric weights
    out_multiple: int  # of output features, which its packing asks for
    can_leave_out: bool  # a linear, in all layers alike
    needs_cuda: bool
    settings: dict[str, object]

    @property
    def environment(self) -> Environment:
        requirements = self.script.with_name(f"{self.name}.txt").read_text(encoding="utf-8")
        return Environment(self.name, requirements, self.module)

    @property
    def script(self) -> Path:
        """What its Python runs."""
        return Path(str(files("llmq.quantize.backends"))) / "jobs" / f"{self.name}_job.py"

    def check(self, plan: "Plan", device: str) -> None:
        """Refuse what the library could not do, or would do wrong. Makes no file.

        Raises InputError, or FailedError where this machine is in the way.
        """
        where = f"--backend {self.name}"
        if self.needs_cuda and (device == "cpu" or not machine.gpus()):
            reason = "--device cpu was asked for" if device == "cpu" else "this machine has none"
            raise FailedError(
                f"{where}: {self.title} quantizes on a CUDA device only, and {reason}; {self.ours} computes the same "
                "method here, on any device"
            )
        for problem in (self._about_model(plan), self._about_scheme(plan), self._about_targets(plan)):
            if problem:
                raise InputError(f"{where}: {problem}; {self.ours} does that")
        if not self.environment.exists:
            from llmq.quantize.backends.environment import find_python

            find_python()

    def _about_model(self, plan: "Plan") -> str | None:
        model_type = plan.source.architecture.model_type
        if model_type not in self.model_types:
            return f"model_type {model_type!r} is not among those it is run on ({', '.join(self.model_types)})"
        rope_type = str(rope_scaling(plan.source.config).get("rope_type", "default"))
        if rope_type not in self.rope_types:
            return f"its transformers computes no RoPE of type {rope_type!r}"
        return None

    def _about_scheme(self, plan: "Plan") -> str | None:
        scheme = plan.recipe.scheme
        if scheme.bits not in self.bits:
            return f"{scheme.bits}-bit weights, and it stores {' or '.join(map(str, self.bits))} bits"
        if scheme.group_size not in self.group_sizes:
            asked = "one group a row" if scheme.group_size is None else f"group size {scheme.group_size}"
            return f"{asked}, and its kernels take {', '.join(map(str, self.group_sizes))}"
        if scheme.symmetric not in self.signs:
            if scheme.symmetric:
                return "symmetric weights, and its layout has zero points always (--asym)"
            return "zero points, and what it writes for a zero point of 0 is read in two ways (--sym)"
        return None

    def _about_targets(self, plan: "Plan") -> str | None:
        odd = [target for target in plan.targets if target.out_features % self.out_multiple]
        if odd:
            return f"{odd[0].name} has {odd[0].out_features} outputs, and it needs a multiple of {self.out_multiple}"
        left_out = {name for name in plan.selection.left_alone if ".layers." in name}
        if left_out and not self.can_leave_out:
            return f"it quantizes every linear of a layer, and {sorted(left_out)[0]} is to be left out"
        uneven = {relative_name(name) for name in left_out} & {relative_name(t.name) for t in plan.targets}
        if uneven:
            return f"{sorted(uneven)[0]} is left out of some layers only, and it leaves a linear out of all or of none"
        return None


def relative_name(module_name: str) -> str:
    """`model.layers.3.mlp.up_proj` -> `mlp.up_proj`"""
    return module_name.split(".layers.", 1)[1].partition(".")[2]


def rope_scaling(config: dict) -> dict[str, object]:
    """RoPE's parameters in either spelling of config.json, in transformers 5's: with `rope_theta` and `rope_type`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_type", "default")
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    return rope


AUTOAWQ = ArchivedLibrary(
    name="autoawq",
    title="AutoAWQ 0.2.9",
    method="awq",
    ours="--awq without --backend",
    module="awq",
    model_types=("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"),
    rope_types=("default", "linear", "dynamic", "yarn", "llama3"),
    bits=(4,),
    group_sizes=(16, 32, 64, 128),
    signs=(False,),
    out_multiple=64,  # its clip search takes 64 or 256 rows at once
    can_leave_out=False,  # its scale search reads the input of each of them
    needs_cuda=False,
    settings={"grid": 20, "duo_scaling": True, "clip": True, "version": "GEMM"},
)

AUTOGPTQ = ArchivedLibrary(
    name="autogptq",
    title="AutoGPTQ 0.7.1",
    method="gptq",
    ours="--gptq without --backend",
    module="auto_gptq",
    model_types=("llama", "mistral", "qwen2"),
    rope_types=("default", "linear", "dynamic"),
    bits=(4, 8),
    group_sizes=(16, 32, 64, 128),
    signs=(True,),
    out_multiple=32,
    can_leave_out=True,
    needs_cuda=True,
    settings={"damping": 0.01, "activation_order": False, "true_sequential": True},
)
