"""SmoothQuant on one decoder layer: smooth its inputs, then round the weights, GPTQ's way, to INT8 rows."""

from torch import Tensor

from llmq.quantize import gptq_layer
from llmq.quantize.layer_work import InputSample, LayerOutcome, LayerWork, ScalingOutcome
from llmq.quantize.mappings import ScaleMapping, why_skipped
from llmq.quantize.scale_folding import ScaleFolding
from llmq.quantize.smoothquant import ALPHAS, SEARCH_TOKENS, search_smoothing


def quantize_layer(work: LayerWork, alpha: float | None = None) -> LayerOutcome:
    """SmoothQuant as a method. alpha: of every mapping; None: searched for each.

    The paper rounds the smoothed weights to nearest; GPTQ's rounding makes a smaller error in the same format.
    """
    outcome = LayerOutcome()
    outcome.changed, outcome.scalings = smooth_layer(work, alpha)
    rounded = gptq_layer.quantize_layer(work)
    outcome.linears, outcome.warnings = rounded.linears, rounded.warnings
    return outcome


def smooth_layer(work: LayerWork, alpha: float | None = None) -> tuple[dict[str, Tensor], list[ScalingOutcome]]:
    """Move the scales and round nothing: the layer still computes what it did.

    Returns what took a scale and stays in 16 bit, as it is stored, and what each mapping came to. Norms as in the
    paper, and two more: v for o, where the query heads of a KV head share their scales, and up for down.
    """
    folding, changed, scalings = ScaleFolding(work), {}, []
    skipped = {mapping: why_skipped(mapping, set(work.schemes)) for mapping in work.mappings}
    used = [mapping for mapping, why in skipped.items() if why is None]
    inputs = work.sample_inputs([mapping.linears[0] for mapping in used], SEARCH_TOKENS) if used else {}
    with folding.checked("SmoothQuant"):
        for mapping, why in skipped.items():
            if why is not None:
                scalings.append(ScalingOutcome(mapping, why))
                continue
            outcome, moved = _smooth(work, folding, mapping, inputs[mapping.linears[0]], alpha)
            scalings.append(outcome)
            changed |= moved
    return changed, scalings


def _smooth(
    work: LayerWork, folding: ScaleFolding, mapping: ScaleMapping, inputs: InputSample, alpha: float | None
) -> tuple[ScalingOutcome, dict[str, Tensor]]:
    found = search_smoothing(
        [work.linear(name).weight for name in mapping.linears],
        inputs.tokens,
        inputs.max_abs,
        work.schemes[mapping.linears[0]],
        work.dtype,
        lambda s: folding.realize(mapping, s),
        ALPHAS if alpha is None else (alpha,),
    )
    moved = {} if found.alpha is None else folding.fold(mapping, found.scales)
    outcome = ScalingOutcome(
        mapping,
        alpha=found.alpha,
        error=found.error,
        unscaled_error=found.unscaled_error,
        num_unusable=found.num_unusable,
    )
    return outcome, moved
