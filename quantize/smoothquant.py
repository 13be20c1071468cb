"""SmoothQuant (Xiao et al., arXiv 2211.10438), as pure functions of tensors.

INT8 for weights and activations: y = (q_x q_w^T) s_x s_w, one scale for each token and for each output channel. A few
input channels hold numbers a hundred times the others', so that a token's scale leaves the rest few of its 256 steps.
Dividing channel j of the input by s_j and multiplying that column of the weight by it changes nothing (eq. 3), and
s_j = max|X_j|^alpha / max|W_j|^(1-alpha) (eq. 4) shares the difficulty between the two. The paper takes one alpha for a
model; here each input's own is searched on the error of the rounded product itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.rounding import round_trip

ALPHAS = tuple(i / 10 for i in range(11))
# Tokens, and output rows, that the error is measured on.
SEARCH_TOKENS = 512
SEARCH_ROWS = 512
_SMALLEST, _LARGEST = 1e-5, 2.0**12

SETTINGS = {"alpha": "searched for each input", "alphas": ALPHAS, "search_tokens": SEARCH_TOKENS}


@dataclass(frozen=True)
class Smoothing:
    """Errors are E|dy|^2 / E|y|^2 of the product with both sides rounded, over the linears that share the input."""

    scales: Tensor  # [in], float32
    alpha: float | None  # None: nothing was better than leaving the scales at 1
    error: float
    unscaled_error: float
    num_unusable: int  # candidates that the source cannot be divided by


def smoothing_scales(max_input: Tensor, max_weight: Tensor, alpha: float) -> Tensor:
    """s of eq. 4, [in], bounded; 1 for a channel that is always zero. max_weight: of the column over all rows."""
    alive = max_input > 0
    s = max_input.clamp(min=_SMALLEST).pow(alpha) / max_weight.clamp(min=_SMALLEST).pow(1 - alpha)
    return torch.where(alive, s.clamp(1 / _LARGEST, _LARGEST), 1.0)


def round_tokens(x: Tensor) -> Tensor:
    """x [num_tokens, in] rounded to INT8 and back with a scale for each token, max|x| / 127.5, as it is at run time."""
    scale = x.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / 127.5
    return (x / scale).round_().clamp_(-128, 127).mul_(scale)


def search_smoothing(
    weights: Sequence[Tensor],
    tokens: Tensor,
    max_input: Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
    realize: Callable[[Tensor], Tensor | None] = lambda s: s,
    alphas: Sequence[float] = ALPHAS,
) -> Smoothing:
    """The alpha of `alphas` that gives the product of `weights` ([out_i, in], float32) and the tokens the least error.

    tokens: [n, in], some of the inputs; max_input: [in], max|x| over all of them. realize: a candidate -> the scales
    that its source can really be divided by, or None. Leaving the scales at 1 is a candidate too, unless one alpha is
    all there is: then it was asked for.
    """
    max_weight = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    most = max(1, SEARCH_ROWS // len(weights))
    rows = torch.cat([weight[:: -(-len(weight) // most)] for weight in weights])
    exact = tokens @ rows.T
    energy = float(exact.square().sum(dtype=torch.float64)) or 1.0

    def error_of(s: Tensor) -> float:
        """Not finite where s is not."""
        product = round_tokens(tokens / s) @ round_trip(rows * s, scheme, dtype).T
        return float(product.sub_(exact).square_().sum(dtype=torch.float64)) / energy

    ones = torch.ones_like(max_input)
    unscaled = error_of(ones)
    best = Smoothing(ones, None, unscaled if len(alphas) > 1 else float("inf"), unscaled, 0)
    unusable = 0
    for alpha in alphas:
        s = realize(smoothing_scales(max_input, max_weight, alpha))
        error = None if s is None else error_of(s)
        if error is None or not error < float("inf"):
            unusable += 1
        elif error < best.error:
            best = Smoothing(s, alpha, error, unscaled, 0)
    if best.error == float("inf"):
        best = Smoothing(ones, None, unscaled, unscaled, 0)
    return Smoothing(best.scales, best.alpha, best.error, unscaled, unusable)
