"""Everything that can be refused in the first second, from config.json and the safetensors headers alone."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.families import FAMILIES
from llmq.profiles.units import format_bytes
from llmq.quantize.backends.registry import OWN, backend_named
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.group_sizes import resolve_group_size
from llmq.quantize.recipe import DEFAULT_FORMAT, LinearSettings, Recipe
from llmq.quantize.siblings import check_siblings
from llmq.quantize.sizes import DTYPE_BYTES, predict_bytes
from llmq.quantize.targets import Selection, Target, fused_sets, select_targets


@dataclass(frozen=True)
class Plan:
    """A quantization that nothing known beforehand speaks against."""

    source: Checkpoint
    out: Path
    recipe: Recipe  # its default's group size resolved
    selection: Selection
    settings: Mapping[str, LinearSettings]  # of each target; group sizes resolved
    dtype: str  # of every tensor that is not quantized: the one config.json declares
    group_size_reason: str
    predicted_bytes: int  # of OUT's weights
    warnings: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[Target, ...]:
        return self.selection.targets

    @property
    def schemes(self) -> dict[str, WeightScheme]:
        """What each target is stored as; none where nothing is rounded."""
        if self.recipe.options.smooth_only:
            return {}
        return {name: settings.scheme for name, settings in self.settings.items()}

    @property
    def scheme_name(self) -> str:
        """For people: the scheme, or how many linears have which."""
        counts: dict[str, int] = {}
        for scheme in self.schemes.values():
            counts[scheme.name] = counts.get(scheme.name, 0) + 1
        if len(counts) < 2:
            return next(iter(counts), f"scales moved, nothing rounded, {self.dtype}")
        return "; ".join(f"{name} ({count} linears)" for name, count in counts.items())

    def with_settings(self, settings: Mapping[str, LinearSettings]) -> "Plan":
        """The same plan with other settings for some targets (what a search chose). Raises InputError as preflight."""
        return _complete(replace(self, settings={**self.settings, **settings}))


def work_path(out: Path) -> Path:
    """The folder beside OUT that keeps finished layers until all are done."""
    out = out.absolute()
    return out.parent / f"{out.name}.work"


def preflight(source: Checkpoint, recipe: Recipe, out: Path, device: str = "auto") -> Plan:
    """Check all that can be checked without reading a weight. Raises InputError or FailedError; makes no file.

    device: auto, cpu or cuda, as asked for: not every backend computes everywhere.
    """
    _refuse_quantized(source)
    _check_architecture(source, recipe)
    _check_extras(recipe)
    dtype = source.architecture.dtype.removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise InputError(f"config.json declares dtype {dtype!r}: {', '.join(DTYPE_BYTES)} are supported")
    if recipe.options.smooth_only:
        dtype = "float32"  # moving scales is an identity; rounding the product to 16 bit is none
    if not (source.path / "tokenizer.json").is_file():
        raise InputError(f"{source.path} has no tokenizer.json: what comes out could be neither served nor evaluated")
    selection = select_targets(source, recipe.ignore, recipe.rules)
    settings, recipe, reason = _resolve_settings(recipe, selection)
    plan = Plan(source, out, recipe, selection, settings, dtype, reason, 0)
    plan = _complete(replace(plan, warnings=(*_block_warnings(plan), *_kv_warnings(recipe))))
    if recipe.backend != OWN:
        backend_named(recipe.backend).check(plan, device)
    _check_out(out, plan.predicted_bytes)
    return plan


def _complete(plan: Plan) -> Plan:
    """Check what the settings of single linears must agree on, and predict the size."""
    check_siblings(fused_sets(plan.source), plan.schemes, plan.selection.left_alone)
    _check_format(plan)
    schemes, recipe = plan.schemes, plan.recipe
    targets = plan.targets if schemes else ()
    size = predict_bytes(plan.source, schemes, targets, plan.dtype, has_kv=recipe.kv is not None, layout=recipe.format)
    return replace(plan, predicted_bytes=size)


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


def _check_architecture(source: Checkpoint, recipe: Recipe) -> None:
    architecture = source.architecture  # refuses an unknown model_type by name
    moving = [settings.method for settings in recipe.all_settings if settings.traits.moves_scales]
    if moving and architecture.family is None:
        raise InputError(
            f"--{moving[0]}: which norm feeds which linears is not known for model_type "
            f"{architecture.model_type!r} ({', '.join(FAMILIES)} are known)"
        )


def _check_extras(recipe: Recipe) -> None:
    if recipe.is_calibrated and importlib.util.find_spec("transformers") is None:
        raise FailedError(
            f"--{recipe.method} needs transformers, not installed here: pip install 'llmq-toolkit[quantize]'"
        )


def _resolve_settings(recipe: Recipe, selection: Selection) -> tuple[dict[str, LinearSettings], Recipe, str]:
    """The settings of each target, the recipe with its default's group size, and why that one."""
    by_settings: dict[LinearSettings, list[Target]] = {}
    for target in selection.targets:
        rule = selection.rules.get(target.name)
        by_settings.setdefault(rule.settings if rule else recipe.default, []).append(target)
    resolved, reason = {}, "no linear takes it: every one has settings of its own"
    for settings, targets in by_settings.items():
        chosen, why = resolve_group_size(settings, targets)
        resolved.update(dict.fromkeys((target.name for target in targets), chosen))
        if settings == recipe.default:
            recipe, reason = replace(recipe, default=chosen), why
    return {target.name: resolved[target.name] for target in selection.targets}, recipe, reason


def _check_format(plan: Plan) -> None:
    if plan.recipe.format == DEFAULT_FORMAT:
        return
    # Imports torch: only where another layout is asked for.
    from llmq.quantize.formats.registry import writer_for

    writer = writer_for(plan.recipe.format)
    for target in plan.targets:
        writer.check(plan.settings[target.name].scheme, (target.out_features, target.in_features))
    if plan.schemes:
        writer.config(plan.schemes, tuple(plan.selection.left_alone), plan.recipe.kv_scheme)


def _block_warnings(plan: Plan) -> tuple[str, ...]:
    """transformers 5.17 loads blocks of weights only where they divide a linear, in either layout."""
    cut = [
        target
        for target in plan.targets
        if (scheme := plan.schemes.get(target.name)) is not None
        and scheme.strategy == "block"
        and (target.out_features % scheme.block_rows or target.in_features % scheme.group_size)
    ]
    if not cut:
        return ()
    return (
        f"blocks of 128×128 do not divide {len(cut)} of {len(plan.targets)} linears ({cut[0].kind}: "
        f"{cut[0].out_features}×{cut[0].in_features}): llmq runs the result, transformers does not load it",
    )


def _kv_warnings(recipe: Recipe) -> tuple[str, ...]:
    """vLLM 0.32 validates a kv_cache_scheme, and takes 8-bit floats alone."""
    if recipe.kv != "int8":
        return ()
    return ("--kv int8: llmq serves such a KV-cache; vLLM takes static scales of FP8 alone and refuses the checkpoint",)


def _check_out(out: Path, predicted_bytes: int) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(f"-o {out} exists already{' and is not empty' if out.is_dir() else ''}: name a new folder")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"-o {out}: {parent} is not a folder that can be written to")
    # Twice: finished layers are kept in a folder of their own until the whole is there; some may be there already.
    kept = sum(path.stat().st_size for path in work_path(out).glob("layer-*"))
    needed, free = max(2 * predicted_bytes - kept, predicted_bytes), shutil.disk_usage(parent).free
    if free < needed * 1.02:
        raise InputError(
            f"-o {out}: the result takes {format_bytes(predicted_bytes)}, and as much again while it is made; "
            f"{parent} has {format_bytes(free)} free"
        )
