"""Everything that can be refused in the first second, from config.json and the safetensors headers alone."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.decoder_tensors import check_tensors
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.families import FAMILIES
from llmq.profiles.units import format_bytes
from llmq.quantize.backends.registry import OWN, backend_named
from llmq.quantize.formats.legal import check_legal, check_together, default_symmetric, loads_experts
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
    recipe: Recipe  # its default resolved
    selection: Selection
    settings: Mapping[str, LinearSettings]  # of each target, resolved
    dtype: str  # of every tensor that is not quantized: the one config.json declares
    group_size_reason: str
    predicted_bytes: int  # of OUT's weights
    loaders: tuple[str, ...] = ()  # who runs OUT packed
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
    check_tensors(source)
    settings, recipe, reason = _resolve_settings(recipe, selection)
    plan = Plan(source, out, recipe, selection, settings, dtype, reason, 0)
    plan = _complete(replace(plan, warnings=(*_block_warnings(plan), *_kv_warnings(recipe), *_expert_warnings(plan))))
    if recipe.backend != OWN:
        backend_named(recipe.backend).check(plan, device)
    _check_out(out, plan.predicted_bytes)
    return plan


def _complete(plan: Plan) -> Plan:
    """Check what the settings of single linears must agree on, and predict the size."""
    check_siblings(fused_sets(plan.source), plan.schemes, plan.selection.left_alone)
    plan = replace(plan, loaders=_loaders(plan))
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
    """The settings of each target, the recipe with its default's, and why the group size is that one."""
    by_settings: dict[LinearSettings, list[Target]] = {}
    for target in selection.targets:
        rule = selection.rules.get(target.name)
        by_settings.setdefault(rule.settings if rule else recipe.default, []).append(target)
    has_experts = any(target.is_expert for target in selection.targets)
    resolved, reason = {}, "no linear takes it: every one has settings of its own"
    for settings, targets in by_settings.items():
        chosen, why = resolve_group_size(settings, targets)
        chosen = _signed(chosen, recipe.format, has_experts)
        resolved.update(dict.fromkeys((target.name for target in targets), chosen))
        if settings == recipe.default:
            recipe, reason = replace(recipe, default=chosen), why
    return {target.name: resolved[target.name] for target in selection.targets}, recipe, reason


def _signed(settings: LinearSettings, format_name: str, has_experts: bool) -> LinearSettings:
    if settings.symmetric is not None:
        return settings
    preferred, bits = settings.traits.symmetric, settings.bits
    return replace(settings, symmetric=default_symmetric(preferred, bits, format_name, has_experts=has_experts))


def _loaders(plan: Plan) -> tuple[str, ...]:
    """Who loads what the format makes of every target. Raises FormatError for what it does not store."""
    if not plan.schemes:
        return ("llmq", "transformers", "vllm")  # a model in 16 bit
    rows = [
        check_legal(plan.schemes[target.name], plan.recipe.format, (target.out_features, target.in_features))
        for target in plan.targets
    ]
    check_together(plan.schemes.values(), plan.recipe.format, has_kv_scales=plan.recipe.kv is not None)
    experts = {plan.schemes[target.name] for target in plan.targets if target.is_expert}
    loaders = [
        name
        for name in rows[0].loaders
        if all(name in row.loaders for row in rows)
        and all(loads_experts(name, scheme, plan.recipe.format) for scheme in experts)
    ]
    if experts and len(set(plan.schemes.values())) > 1 and "transformers" in loaders:
        loaders.remove("transformers")  # 5.17 takes the experts for the first group's
    if plan.recipe.kv == "int8" and "vllm" in loaders:
        loaders.remove("vllm")
    if _cut_by_blocks(plan) and "transformers" in loaders:
        loaders.remove("transformers")
    return tuple(loaders)


def _block_warnings(plan: Plan) -> tuple[str, ...]:
    if not (cut := _cut_by_blocks(plan)):
        return ()
    return (
        f"blocks of 128×128 do not divide {len(cut)} of {len(plan.targets)} linears ({cut[0].kind}: "
        f"{cut[0].out_features}×{cut[0].in_features}): llmq runs the result, transformers does not load it",
    )


def _cut_by_blocks(plan: Plan) -> list[Target]:
    """Linears that blocks of weights do not divide: transformers 5.17 loads them in no layout."""
    return [
        target
        for target in plan.targets
        if (scheme := plan.schemes.get(target.name)) is not None
        and scheme.strategy == "block"
        and (target.out_features % scheme.block_rows or target.in_features % scheme.group_size)
    ]


def _kv_warnings(recipe: Recipe) -> tuple[str, ...]:
    """vLLM 0.32 validates a kv_cache_scheme, and takes 8-bit floats alone."""
    if recipe.kv != "int8":
        return ()
    return ("--kv int8: llmq serves such a KV-cache; vLLM takes static scales of FP8 alone and refuses the checkpoint",)


def _expert_warnings(plan: Plan) -> tuple[str, ...]:
    """What others load as a linear they do not all load as an expert."""
    schemes = plan.schemes
    experts = [target.name for target in plan.targets if target.is_expert and target.name in schemes]
    if all(schemes[name].symmetric for name in experts) or plan.recipe.format != DEFAULT_FORMAT:
        return ()
    return (
        f"{len(experts)} linears of experts have zero points: llmq runs them, and vLLM and transformers load experts "
        "without zero points alone (--sym)",
    )


def _check_out(out: Path, predicted_bytes: int) -> None:
    try:
        if (os.path.lexists(out) and not out.is_dir()) or (out.is_dir() and any(out.iterdir())):
            raise InputError(f"-o {out} exists already{' and is not empty' if out.is_dir() else ''}: name a new folder")
        parent = out.absolute().parent
        while not parent.exists():
            parent = parent.parent
        # Of the folder that becomes OUT, see `appearing_whole`.
        longest = len(os.fsencode(out.name)) + len("..partial-1234567")
        is_too_long = longest > os.pathconf(parent, "PC_NAME_MAX")
    except OSError as error:
        raise InputError(f"-o {out}: {error.strerror}") from None
    if is_too_long:
        raise InputError(f"-o {out}: its name is too long")
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
