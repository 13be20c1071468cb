"""GPTQ on one decoder layer: all its linears rounded for the inputs that the layer's own, unrounded, give them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.gptq import Rounded, default_damping, factorize, gptq
from llmq.quantize.layer_work import InputStatistics, LayerOutcome, LayerWork, LinearOutcome
from llmq.quantize.rounding import range_grid, saturated_share


def quantize_layer(work: LayerWork, damping: float | None = None) -> LayerOutcome:
    """GPTQ as a method. damping: as a share of the Hessian's mean diagonal (None: `default_damping`); raised where that
    does not factorize.

    Each is rounded for the inputs that the layers before this one, rounded, and its own linears, unrounded, give it. To
    run the layer again after each of q/k/v, o and gate/up (the paper's code has it as "true sequential") was tried on
    SmolLM2: over 14 layers it gave a KL of 0.212 against 0.215, over six 0.108 against 0.103, at 1.7 times the cost.
    A linear that no token reached, or whose Hessian no damping makes positive definite, is rounded to nearest, with a
    warning that says so.
    """
    outcome = LayerOutcome()
    statistics = work.measure()
    while statistics:
        names = _of_one_product(statistics, work.schemes)
        inputs = [statistics.pop(name) for name in names][0]  # noqa: RUF015 - all of them are taken out
        # Of a wide linear the largest thing in memory: where no other linear needs it, it is worked on as it is.
        owns_gram = all(other is not inputs for other in statistics.values())
        made = _quantize_together(work, names, inputs, owns_gram, damping, outcome.warnings)
        outcome.linears.update(made)
    return outcome


def _of_one_product(statistics: dict[str, InputStatistics], schemes: Mapping[str, WeightScheme]) -> list[str]:
    """The first linear, and those that share its input and its scheme: their rows go through GPTQ side by side."""
    first = next(iter(statistics))
    return [name for name in statistics if statistics[name] is statistics[first] and schemes[name] == schemes[first]]


def _quantize_together(
    work: LayerWork,
    names: list[str],
    inputs: InputStatistics,
    owns_gram: bool,
    damping: float | None,
    warnings: list[str],
) -> dict[str, LinearOutcome]:
    scheme, num_dead, num_tokens = work.schemes[names[0]], inputs.num_dead, inputs.num_tokens
    weight = torch.cat([work.linear(name).weight for name in names])
    if damping is None:
        damping = default_damping(weight.shape[1], num_tokens)
    hessian = factorize(inputs.gram, damping, owns_gram=owns_gram) if num_tokens else None
    del inputs
    nearest = range_grid(weight, scheme, work.dtype)
    nearest = Rounded(nearest.nearest(weight), nearest)
    if hessian is None:
        reason = "its Hessian is not positive definite at any damping" if num_tokens else "no calibration token came"
        warnings.append(f"{', '.join(names)}: rounded to nearest, {reason}")
        rounded, errors = nearest, None
    else:
        if hessian.damping != damping:
            warnings.append(f"{', '.join(names)}: damping raised from {damping:g} to {hessian.damping:g}")
        rounded = gptq(weight, hessian, scheme, work.dtype)
        errors = [hessian.output_errors(x) for x in (rounded.weight - weight, nearest.weight - weight, weight)]
    made, start = {}, 0
    for name in names:
        linear = work.linear(name)
        rows = slice(start, start := start + linear.out_features)
        part, original = rounded.rows(rows), weight[rows]
        linear.weight.copy_(part.weight)
        ours, plain, energy = (None, None, None) if errors is None else (error[rows].sum() for error in errors)
        made[name] = LinearOutcome(
            weight=part.grid.store(part.q, work.dtype),
            weight_error=_share((linear.weight - original).square().sum(), original.square().sum()),
            output_error=_share(ours, energy),
            rtn_output_error=_share(plain, energy),
            saturated_share=saturated_share(original, part.grid),
            num_dead_inputs=num_dead,
            num_tokens=num_tokens,
            damping=None if hessian is None else hessian.damping,
        )
    return made


def _share(part: Tensor | None, whole: Tensor | None) -> float | None:
    return None if part is None else float(part / whole.clamp(min=1e-30))
