"""Our methods by name, and one decoder layer taken through those that its linears are to have."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llmq.quantize import awq, awq_layer, best_layer, fp8, fp8_layer, gptq, gptq_layer, smoothquant, smoothquant_layer
from llmq.quantize.layer_result import LayerResult
from llmq.quantize.layer_work import LayerOutcome, LayerWork, LinearOutcome, Method
from llmq.quantize.recipe import METHODS, LinearSettings, MethodOptions, Recipe
from llmq.quantize.report import ScalingReport, linear_report, relative_error
from llmq.quantize.rounding import quantize_weight
from llmq.quantize.targets import Target


def round_layer(work: LayerWork) -> LayerOutcome:
    """Round to nearest: every linear on its own, from its weight alone."""
    outcome = LayerOutcome()
    for name, scheme in work.schemes.items():
        linear = work.linear(name)
        stored = quantize_weight(linear.weight, scheme, work.dtype)
        dense = stored.dequantize()
        outcome.linears[name] = LinearOutcome(stored, weight_error=relative_error(dense, linear.weight))
        linear.weight.copy_(dense)
    return outcome


# Method -> what to do to a layer, with the options.
_OURS: dict[str, Callable[[MethodOptions], Method]] = {
    "awq": lambda options: awq_layer.quantize_layer,
    "gptq": lambda options: partial(gptq_layer.quantize_layer, damping=options.damp),
    "best": lambda options: partial(
        best_layer.quantize_layer, methods={name: _OURS[name](options) for name in ("awq", "gptq")}
    ),
    "smoothquant": lambda options: partial(smoothquant_layer.quantize_layer, alpha=options.alpha),
    "fp8": lambda options: fp8_layer.quantize_layer,
    "rtn": lambda options: round_layer,
}

# Of those that move scales: the moving alone.
_SMOOTHING: dict[str, Callable[[MethodOptions], Callable[[LayerWork], tuple[dict, list]]]] = {
    "awq": lambda options: awq_layer.smooth_layer,
    "smoothquant": lambda options: partial(smoothquant_layer.smooth_layer, alpha=options.alpha),
}


def method_of(name: str, options: MethodOptions) -> Method:
    """The method called `name`, as the options have it."""
    return partial(_smooth_only, _SMOOTHING[name](options)) if options.smooth_only else _OURS[name](options)


def _smooth_only(smooth: Callable[[LayerWork], tuple[dict, list]], work: LayerWork) -> LayerOutcome:
    changed, scalings = smooth(work)
    weights = {f"{name}.weight": work.linear(name).weight.detach() for name in work.schemes}
    return LayerOutcome(changed={**changed, **weights}, scalings=scalings)


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """What the recipe's methods look at, for the report."""
    return {name: _SETTINGS[name] | _given(name, recipe.options) for name in sorted(recipe.methods)}


_SETTINGS: dict[str, dict[str, Any]] = {
    "awq": awq.SETTINGS,
    "gptq": gptq.SETTINGS,
    "best": {"awq": awq.SETTINGS, "gptq": gptq.SETTINGS, "compared batches": best_layer.NUM_COMPARED},
    "smoothquant": smoothquant.SETTINGS,
    "fp8": fp8.SETTINGS,
    "rtn": {},
}


def _given(method: str, options: MethodOptions) -> dict[str, Any]:
    """What was asked for in place of a method's own setting."""
    damping = {"damping": options.damp}
    given = {"gptq": damping, "best": damping, "smoothquant": {"alpha": options.alpha}}.get(method, {})
    return {name: value for name, value in given.items() if value is not None}


def quantize_layer(
    work_for: Callable[[dict[str, LinearSettings]], LayerWork],
    settings: Mapping[str, LinearSettings],
    options: MethodOptions,
) -> LayerOutcome:
    """Take a layer through the methods of its linears; those that move scales come first.

    settings: of each linear by its name in the layer. work_for: some of them -> the work on those.
    """
    outcome = LayerOutcome()
    methods = {entry.method for entry in settings.values()}
    for method in sorted(methods, key=lambda name: (not METHODS[name].moves_scales, list(METHODS).index(name))):
        chosen = {name: entry for name, entry in settings.items() if entry.method == method}
        made = method_of(method, options)(work_for(chosen))
        outcome.linears |= made.linears
        outcome.changed |= made.changed
        outcome.scalings += made.scalings
        outcome.warnings += made.warnings
    return outcome


def as_result(
    prefix: str,
    outcome: LayerOutcome,
    targets: Mapping[str, Target],
    settings: Mapping[str, LinearSettings],
    routed_tokens: Mapping[str, int],
) -> LayerResult:
    """The outcome under the checkpoint's names. targets, settings: by name in the layer. routed_tokens: of experts."""
    result = LayerResult(
        changed={prefix + name: tensor for name, tensor in outcome.changed.items()},
        warnings=[f"{prefix.rstrip('.')}: {warning}" for warning in outcome.warnings],
    )
    for name, target in targets.items():
        if (linear := outcome.linears.get(name)) is None:
            continue
        result.linears[target.name] = linear.weight
        result.reports.append(
            linear_report(
                target,
                linear.weight,
                weight_error=linear.weight_error,
                output_error=linear.output_error,
                rtn_output_error=linear.rtn_output_error,
                saturated_share=linear.saturated_share,
                dead_inputs=linear.num_dead_inputs,
                num_tokens=linear.num_tokens,
                damping=linear.damping,
                routed_tokens=routed_tokens.get(name),
                method=linear.method or settings[name].method,
            )
        )
    layer = int(prefix.rstrip(".").rpartition(".")[2])
    for scaling in outcome.scalings:
        result.scalings.append(
            ScalingReport(
                layer=layer,
                source=prefix + scaling.mapping.source,
                linears=tuple(prefix + name for name in scaling.mapping.linears),
                skipped=scaling.skipped,
                alpha=scaling.alpha,
                error=scaling.error,
                unscaled_error=scaling.unscaled_error,
                num_unusable=scaling.num_unusable,
                num_sharing=scaling.num_sharing,
            )
        )
    return result
