"""Everything that can be refused in the first second, from config.json and the safetensors headers alone."""

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.families import FAMILIES
from llmq.profiles.units import format_bytes
from llmq.quantize.recipe import STANDARD_GROUP_SIZES, Recipe
from llmq.quantize.targets import HEAD, Selection, Target, select_targets

# Method -> modules it needs beside the base install.
_NEEDS = {
    "rtn": (),
    "awq": ("transformers",),
    "gptq": ("transformers", "llmcompressor"),
    "smoothquant": ("transformers", "llmcompressor"),
    "fp8": ("transformers", "llmcompressor"),
}
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Plan:
    """A quantization that nothing known beforehand speaks against."""

    source: Checkpoint
    out: Path
    recipe: Recipe  # group size resolved
    selection: Selection
    dtype: str  # of every tensor that is not quantized: the one config.json declares
    group_size_reason: str
    predicted_bytes: int  # of OUT's weights
    warnings: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[Target, ...]:
        return self.selection.targets


def preflight(source: Checkpoint, recipe: Recipe, out: Path) -> Plan:
    """Check all that can be checked without reading a weight. Raises InputError or FailedError; makes no file."""
    _refuse_quantized(source)
    architecture = source.architecture  # refuses an unknown model_type by name
    if recipe.method in ("awq", "smoothquant") and architecture.family is None:
        raise InputError(
            f"--{recipe.method}: which norm feeds which linears is not known for model_type "
            f"{architecture.model_type!r} ({', '.join(FAMILIES)} are known)"
        )
    if (
        recipe.method in ("gptq", "fp8", "smoothquant")
        and architecture.family is not None
        and architecture.family.experts is not None
    ):
        raise InputError(
            f"--{recipe.method}: llm-compressor sees the experts of a {architecture.model_type} fused into one, where "
            "they are stored one by one; --rtn quantizes them"
        )
    _check_extras(recipe)
    dtype = architecture.dtype.removeprefix("torch.")
    if dtype not in _DTYPE_BYTES:
        raise InputError(f"config.json declares dtype {dtype!r}: {', '.join(_DTYPE_BYTES)} are supported")
    if not (source.path / "tokenizer.json").is_file():
        raise InputError(f"{source.path} has no tokenizer.json: what comes out could be neither served nor evaluated")
    selection = select_targets(source, recipe.ignore)
    recipe, reason = _resolve_group_size(recipe, selection.targets)
    predicted_bytes = predict_bytes(source, recipe, selection, dtype)
    _check_out(out, predicted_bytes)
    return Plan(source, out, recipe, selection, dtype, reason, predicted_bytes, _fusion_warnings(selection))


def predict_bytes(source: Checkpoint, recipe: Recipe, selection: Selection, dtype: str) -> int:
    """Bytes of the tensors of OUT."""
    scheme, element_bytes = recipe.scheme, _DTYPE_BYTES[dtype]
    total = 0
    for target in selection.targets:
        groups = scheme.num_groups(target.in_features)
        if scheme.layout == "pack-quantized":
            total += target.out_features * (-(-target.in_features * scheme.bits // 32)) * 4 + 16  # and weight_shape
        else:
            total += target.out_features * target.in_features
        total += target.out_features * groups * element_bytes
        if not scheme.symmetric:
            total += -(-target.out_features * scheme.bits // 32) * 4 * groups
    quantized = {f"{target.name}.weight" for target in selection.targets}
    for name, info in source.tensors.items():
        if name not in quantized and not (name == f"{HEAD}.weight" and is_duplicate_head(source)):
            total += info.num_elements * element_bytes
    return total


def is_duplicate_head(source: Checkpoint) -> bool:
    """Whether the checkpoint stores a head although its config ties it to the embedding."""
    return bool(source.config.get("tie_word_embeddings")) and f"{HEAD}.weight" in source.tensors


def _refuse_quantized(source: Checkpoint) -> None:
    if source.quantization is None:
        return
    method = source.quantization.get("quant_method", "unknown method")
    detail = ""
    for group in (source.quantization.get("config_groups") or {}).values():
        weights = (group or {}).get("weights") or {}
        detail = f", {weights.get('num_bits')}-bit {weights.get('type', 'int')} weights"
    if "bits" in source.quantization:
        detail = f", {source.quantization['bits']}-bit weights"
    raise InputError(f"{source.path} is already quantized ({method}{detail}): quantize the original model instead")


def _check_extras(recipe: Recipe) -> None:
    missing = [name for name in _NEEDS[recipe.method] if importlib.util.find_spec(name) is None]
    if missing:
        raise FailedError(
            f"--{recipe.method} needs {' and '.join(missing)}, not installed here: pip install 'llmq-toolkit[quantize]'"
        )


def _resolve_group_size(recipe: Recipe, targets: tuple[Target, ...]) -> tuple[Recipe, str]:
    if not recipe.traits.is_grouped:
        return recipe, f"--{recipe.method} has one scale a row"
    if recipe.group_size == "channel":
        return recipe, "as asked: one group a row"
    if recipe.group_size == "auto":
        dividing = _dividing_sizes(targets)
        if not dividing:
            sizes = sorted({target.in_features for target in targets})
            raise InputError(
                f"--group-size auto: none of {', '.join(map(str, STANDARD_GROUP_SIZES))} divides every target's inputs "
                f"({', '.join(map(str, sizes))}); use --group-size channel or leave some out with --ignore"
            )
        return recipe.with_group_size(dividing[0]), _auto_reason(dividing[0], targets)
    offenders = [target for target in targets if target.in_features % recipe.group_size]
    if offenders:
        raise InputError(_group_size_message(recipe.group_size, offenders, targets))
    return recipe, "as asked"


def _dividing_sizes(targets: tuple[Target, ...]) -> list[int]:
    return [size for size in STANDARD_GROUP_SIZES if all(target.in_features % size == 0 for target in targets)]


def _auto_reason(chosen: int, targets: tuple[Target, ...]) -> str:
    if chosen == STANDARD_GROUP_SIZES[0]:
        return f"auto: {chosen} divides every target"
    larger = STANDARD_GROUP_SIZES[STANDARD_GROUP_SIZES.index(chosen) - 1]
    sizes = sorted({target.in_features for target in targets if target.in_features % larger})
    return f"auto: the largest of {STANDARD_GROUP_SIZES} that divides every target ({larger} does not divide {sizes})"


def _group_size_message(size: int, offenders: list[Target], targets: tuple[Target, ...]) -> str:
    by_inputs: dict[int, list[str]] = {}
    for target in offenders:
        kinds = by_inputs.setdefault(target.in_features, [])
        if target.kind not in kinds:
            kinds.append(target.kind)
    rows = [
        f"  {', '.join(kinds)}: {inputs} inputs = {inputs // size}·{size} + {inputs % size}"
        for inputs, kinds in sorted(by_inputs.items())
    ]
    usable = _dividing_sizes(targets)
    proposal = f"use --group-size {' or '.join(map(str, usable))} (or auto)" if usable else "use --group-size channel"
    ignore = " ".join(f"--ignore {kind}" for kinds in by_inputs.values() for kind in kinds)
    return (
        f"--group-size {size} does not divide the inputs of {len(offenders)} of {len(targets)} linears:\n"
        + "\n".join(rows)
        + f"\n{proposal}, or leave these in 16 bit: {ignore}"
    )


def _fusion_warnings(selection: Selection) -> tuple[str, ...]:
    """vLLM runs q, k and v as one linear, gate and up as another: all or none of them must be quantized."""
    split = []
    for siblings in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        by_layer: dict[int, set[str]] = {}
        for target in selection.targets:
            if target.kind in siblings:
                by_layer.setdefault(target.layer, set()).add(target.kind)
        if any(len(kinds) < len(siblings) for kinds in by_layer.values()):
            split.append(", ".join(siblings))
    return tuple(
        f"only some of {names} are quantized in a layer: vLLM fuses them and will not load the result"
        for names in split
    )


def _check_out(out: Path, predicted_bytes: int) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(f"-o {out} exists already{' and is not empty' if out.is_dir() else ''}: name a new folder")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"-o {out}: {parent} is not a folder that can be written to")
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < predicted_bytes * 1.02:
        raise InputError(
            f"-o {out}: the result takes {format_bytes(predicted_bytes)}, {parent} has {format_bytes(free_bytes)} free"
        )
