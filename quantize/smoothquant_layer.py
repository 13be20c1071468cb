"""SmoothQuant on one decoder layer: smooth its inputs, then round the weights, GPTQ's way, to INT8 rows."""

from collections.abc import Mapping

from torch import Tensor

from llmq.quantize import gptq_layer
from llmq.quantize.layer_work import InputSample, LayerOutcome, LayerWork, SampledStatistics, ScalingOutcome
from llmq.quantize.mappings import ScaleMapping, why_skipped
from llmq.quantize.scale_folding import ScaleFolding
from llmq.quantize.smoothquant import ALPHAS, SEARCH_TOKENS, Smoothing, search_smoothing


def quantize_layer(work: LayerWork, alpha: float | None = None) -> LayerOutcome:
    """SmoothQuant as a method. alpha: of every mapping; None: searched for each.

    The paper rounds the smoothed weights to nearest; GPTQ's rounding makes a smaller error in the same format. The
    layer runs once for both: an input that is divided by s has the second moments E[x x^T] / (s s^T).
    """
    outcome = LayerOutcome()
    statistics = work.measure_and_sample(SEARCH_TOKENS)
    outcome.changed, outcome.scalings = _smooth_layer(work, alpha, statistics)
    rounded = gptq_layer.quantize_layer(work, statistics=statistics)
    outcome.linears, outcome.warnings = rounded.linears, rounded.warnings
    return outcome


def smooth_layer(work: LayerWork, alpha: float | None = None) -> tuple[dict[str, Tensor], list[ScalingOutcome]]:
    """Move the scales and round nothing: the layer still computes what it did.

    Returns what took a scale and stays in 16 bit, as it is stored, and what each mapping came to. Norms as in the
    paper, and two more: v for o, where the query heads of a KV head share their scales, and up for down.
    """
    used = [mapping.linears[0] for mapping in work.mappings if why_skipped(mapping, set(work.schemes)) is None]
    return _smooth_layer(work, alpha, work.sample_inputs(used, SEARCH_TOKENS) if used else {})


def _smooth_layer(
    work: LayerWork, alpha: float | None, inputs: Mapping[str, InputSample | SampledStatistics]
) -> tuple[dict[str, Tensor], list[ScalingOutcome]]:
    """inputs: of the first linear of each mapping that is used, before any scale is moved; statistics among them become
    those of what the scales leave.
    """
    folding, changed, scalings = ScaleFolding(work), {}, []
    with folding.checked("SmoothQuant"):
        for mapping in work.mappings:
            if (why := why_skipped(mapping, set(work.schemes))) is not None:
                scalings.append(ScalingOutcome(mapping, why))
                continue
            found = _search(work, folding, mapping, inputs[mapping.linears[0]], alpha)
            scalings.append(
                ScalingOutcome(
                    mapping,
                    alpha=found.alpha,
                    error=found.error,
                    unscaled_error=found.unscaled_error,
                    num_unusable=found.num_unusable,
                    num_sharing=folding.num_sharing(mapping),
                )
            )
            if found.alpha is not None:
                changed |= folding.fold(mapping, found.scales)
                _divide(mapping, inputs, found.scales)
    return changed, scalings


def _search(
    work: LayerWork,
    folding: ScaleFolding,
    mapping: ScaleMapping,
    inputs: InputSample | SampledStatistics,
    alpha: float | None,
) -> Smoothing:
    return search_smoothing(
        [work.linear(name).weight for name in mapping.linears],
        inputs.tokens,
        inputs.max_abs,
        work.schemes[mapping.linears[0]],
        work.dtype,
        lambda s: folding.realize(mapping, s),
        ALPHAS if alpha is None else (alpha,),
    )


def _divide(mapping: ScaleMapping, inputs: Mapping[str, InputSample | SampledStatistics], s: Tensor) -> None:
    """Each statistics once, of however many linears it is."""
    own = {id(inputs[name]): inputs[name] for name in mapping.linears if name in inputs}
    for statistics in own.values():
        if isinstance(statistics, SampledStatistics):
            statistics.divide(s)
