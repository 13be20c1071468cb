"""AWQ: Activation-aware Weight Quantization (Lin et al., arXiv 2306.00978), as pure functions of tensors.

Some input channels carry much larger activations than others; the error made on their weights is multiplied by that.
AWQ multiplies each input channel's weights by a scale s before rounding and divides the activation by it (eq. 2), so
that important channels are rounded more finely, and searches s = s_x^alpha over alpha in [0, 1] for the least output
error (eqs. 4 and 5). Then it shrinks the range of each group where that lowers the error (the paper's clipping), and
rounds to nearest. One thing is ours: the steps of the rounded weight are fitted again by least squares (`scale_fit`).

The error of a linear's output over all calibration tokens x is exact and cheap from their second moment G = E[x x^T]:

    E |(W - W')x|^2 = trace((W - W') G (W - W')^T)

so no token is ever kept, and a search over 16,384 tokens costs as much as one over a single token per input channel.
What goes straight into the residual stream (o, down) is judged by it. Behind q, k, v and gate, up stands more of the
layer: their scales are searched on the output of the whole layer, for some of the tokens. The error of the layer's
output that each choice leaves, as a share of that without scales, in layers 1, 8 and 16 of SmolLM2-135M (3 bits):

    q, k, v    by the Gram form 0.52, 0.72, 0.36    by the layer's output 0.43, 0.60, 0.36
    gate, up                    0.90, 0.90, 0.73                          0.89, 0.90, 0.73
    down                        0.84, 0.88, 0.82                          0.84, 0.88, 0.82

E|dy|^2 as a share of round to nearest's, the mean over 8 inputs of layers 1 and 16 of SmolLM2-135M (3 bits, groups of
64, asymmetric, 8192 tokens): scales 0.680, with the clip 0.515, with the steps fitted again 0.456.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.layer_work import FIRST_TOKEN_SHARE, InputStatistics
from llmq.quantize.rounding import round_trip

# The search looks at these, then at the neighbours of the best one at each of the finer steps.
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
FINER_STEPS = (0.1, 0.05)
CLIPS = tuple(1 - i / 20 for i in range(1, 9))  # 0.95 .. 0.6
# Output rows that an error is measured on while searching: evenly spread, so that the choice is the same and wide
# layers do not make it slow.
MAX_SEARCH_ROWS = 512
# Bound of a scale, both ways: beyond it a channel's weights would leave the range of half precision.
_MAX_SCALE = 2.0**12

SETTINGS = {
    "first_token": f"at least {FIRST_TOKEN_SHARE} of a sample's weight",
    "alphas": ALPHAS,
    "finer_steps": FINER_STEPS,
    "clips": CLIPS,
    "search_rows": MAX_SEARCH_ROWS,
    "steps": "fitted by least squares",
}


@dataclass(frozen=True)
class ScaleChoice:
    """The outcome of a search, with the error that `error_of` gave it."""

    scales: Tensor  # [in], float32
    alpha: float
    error: float
    unscaled_error: float  # the same with s = 1: what round to nearest does
    num_unusable: int  # candidates that were not finite in the stored dtype


def output_error(delta: Tensor, gram: Tensor) -> float:
    """E|delta x|^2 over the tokens of `gram`; delta [out, in]."""
    return float(torch.sum((delta @ gram) * delta, dtype=torch.float64))


def candidate_scales(mean_abs: Tensor, weight_size: Tensor, alpha: float) -> Tensor:
    """s = E|x|^alpha / weight_size^(1-alpha), its geometric middle at 1, bounded; a dead channel keeps 1.

    The paper's s_x^alpha, with the weights' own relative size in the denominator as its reference code has it
    ("duo scaling").
    """
    alive = mean_abs > 0
    s = mean_abs.clamp(min=1e-8).pow(alpha) / weight_size.clamp(min=1e-4).pow(1 - alpha)
    if not bool(alive.any()):
        return torch.ones_like(s)
    s = s / (s[alive].max() * s[alive].min()).sqrt()
    return torch.where(alive, s.clamp(1 / _MAX_SCALE, _MAX_SCALE), 1.0)


def relative_weight_size(weights: Sequence[Tensor], scheme: WeightScheme) -> Tensor:
    """Mean over all rows of |w| as a share of its group's largest, [in]: how much of the range a channel uses."""
    stacked = torch.cat([w.view(w.shape[0], scheme.num_groups(w.shape[1]), -1).abs() for w in weights])
    share = stacked / stacked.amax(-1, keepdim=True).clamp(min=1e-12)
    return share.mean(0).flatten()


def search_scales(
    weights: Sequence[Tensor],
    moments: InputStatistics,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    realize: Callable[[Tensor], Tensor | None] = lambda s: s,
    error_of: Callable[[Tensor], float] | None = None,
) -> ScaleChoice:
    """The alpha whose scales give the least output error of `weights` ([out_i, in], float32, all reading one input).

    realize: a candidate -> the scales that its source can really be divided by (a stored norm rounds them, query heads
    share them), or None if it cannot. s = 1 is always a candidate: a choice exists, and is never worse than none.
    error_of: scales -> the error they leave, not finite where they cannot be used; default: `gram_error` of `weights`.
    """
    error_of = error_of or gram_error(weights, moments.gram, scheme, scale_dtype)
    mean_abs, weight_size = moments.mean_abs, relative_weight_size(weights, scheme)
    ones = torch.ones_like(mean_abs)
    unscaled = error_of(ones)
    best = _Candidate(0.0, ones, unscaled)
    unusable = 0
    for alphas in (ALPHAS, *FINER_STEPS):
        if isinstance(alphas, float):
            alphas = [alpha for alpha in (best.alpha - alphas, best.alpha + alphas) if 0 <= alpha <= 1]
        for alpha in alphas:
            s = realize(candidate_scales(mean_abs, weight_size, alpha))
            error = None if s is None else error_of(s)
            if error is None or not error < float("inf"):
                unusable += 1
            elif error < best.error:
                best = _Candidate(alpha, s, error)
    return ScaleChoice(best.scales, best.alpha, best.error, unscaled, unusable)


@dataclass(frozen=True)
class _Candidate:
    alpha: float
    scales: Tensor
    error: float


def _spread_rows(weight: Tensor, most: int) -> Tensor:
    """At most about `most` rows, evenly spread."""
    return weight[:: max(1, -(-weight.shape[0] // max(most, 1)))]


def gram_error(
    weights: Sequence[Tensor], gram: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> Callable[[Tensor], float]:
    """Scales -> E|dy|^2 / E|y|^2 of the linears' outputs, over the tokens of `gram`, on some of their rows."""
    sampled = [_spread_rows(w, MAX_SEARCH_ROWS * w.shape[0] // sum(v.shape[0] for v in weights)) for w in weights]
    energy = sum(output_error(w, gram) for w in sampled) or 1.0
    return lambda s: sum(output_error(scaled_round_trip(w, s, scheme, scale_dtype) - w, gram) for w in sampled) / energy


def scaled_round_trip(weight: Tensor, s: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype) -> Tensor:
    """What W becomes to an input that is not scaled, of rounding W·s and reading x / s: not finite where s is not."""
    return round_trip(weight * s, scheme, scale_dtype) / s


def search_clip(
    weight: Tensor, gram: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clips: Sequence[float] = CLIPS
) -> Tensor:
    """The share of each group's range that is best kept, [out, num_groups], each group by its own output error.

    weight and gram are in the coordinates that are rounded (after scaling). The error of group g of a row is
    d_g^T G_gg d_g, with G_gg the group's block of E[x x^T].
    """
    num_groups = scheme.num_groups(weight.shape[1])
    blocks = _diagonal_blocks(gram, num_groups)  # [num_groups, size, size]
    best_clip = torch.ones(weight.shape[0], num_groups, device=weight.device)
    best_error = _group_errors(weight, blocks, scheme, scale_dtype, 1.0)
    for clip in clips:
        error = _group_errors(weight, blocks, scheme, scale_dtype, clip)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_clip[better] = clip
    return best_clip


def _group_errors(
    weight: Tensor, blocks: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, clip: float
) -> Tensor:
    """[out, num_groups]"""
    delta = round_trip(weight, scheme, scale_dtype, clip) - weight
    delta = delta.view(weight.shape[0], blocks.shape[0], -1).transpose(0, 1)  # [num_groups, out, size]
    return (torch.bmm(delta, blocks) * delta).sum(-1).T


def _diagonal_blocks(gram: Tensor, num_groups: int) -> Tensor:
    size = gram.shape[0] // num_groups
    return torch.stack([gram[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(num_groups)])
