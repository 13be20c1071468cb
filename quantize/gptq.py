"""GPTQ (Frantar et al., arXiv 2210.17323), as pure functions of tensors.

The squared error of a linear's output, E|(W' - W)x|^2 = trace((W' - W) H (W' - W)^T) with H = E[x x^T], ties the
columns of W together: the error of one rounded column can be taken up by those that are not rounded yet. GPTQ rounds
column after column, and after each moves the rest to where the error is least (the paper's eqs. 2 and 3). With
H = U D U^T, U upper triangular with ones on its diagonal, that is

    W'_k = round(W_k + sum_{j<k} (W_j - W'_j) U_jk),        error = sum_k D_k |step k's rounding|^2

(LDLQ, Chee et al., arXiv 2307.13304, theorem 6: the same numbers as the paper's inverse Cholesky, and no inverse).

Two things are done after it, both of which can only lower that error:

- a sweep of coordinate descent: each column is rounded again where its error is least given all the others
  (QuantEase, Behdin et al., arXiv 2309.01885, eq. 9), for GPTQ never looks back at a column;
- scales again: given the integers, W' is linear in the scales, and their least squares have a closed form.

Tried on SmolLM2-135M, the mean over 8 inputs of layers 1 and 16 of E|dy|^2 as a share of round to nearest's (3 bits,
groups of 64, asymmetric, 8192 tokens; range: the grid reaches from least to largest weight):

    GPTQ on the range grid                  0.279
    … on the grid of least squared error    0.260
    … weighted with the Hessian's diagonal  0.250   (with its diagonal blocks 0.252, and zeros searched too 0.252)
    and two sweeps                          0.234
    and scales again                        0.230
    and twice a sweep and scales again      0.225   (each round costs what GPTQ itself does: one is made)

and on other text than the calibration's 5 % less than without sweeps and new scales, at 3 and at 4 bits.

Tried and left out, by the KL divergence of the whole model with its first 6 layers at 3 bits (4096 tokens of
calibration, measured on 2044 others; two runs that differ in nothing that matters are 4 % apart):

    GPTQ on the range grid                                                    0.138
    all of the above                                                          0.108
    AWQ's scales before it                                                    0.118
    the outputs for the unquantized model's inputs as target (GPTAQ, Li et    0.141
    al., arXiv 2504.02692), and half way to them                              0.108
    tokens weighted with the inverse square of their residual stream          0.120

Stage after stage of a layer (q/k/v, o, gate/up, down) gave 0.212 in 14 layers, all at once 0.215.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.rounding import Grid, searched_grid
from llmq.quantize.scale_fit import quadratic_form, refit_scales

DAMPING = 0.01  # of the Hessian's mean diagonal: the paper's, and the least that is taken
_LARGEST_DEFAULT_DAMPING = 0.1
# A failed Cholesky raises the damping by this factor, until it exceeds _MAX_DAMPING.
_DAMPING_STEP = 10.0
_MAX_DAMPING = 1.0
# Columns between two updates of all that follow: the paper's lazy batches (section 3.3, step 2).
BLOCK_COLUMNS = 128
# Rounds of a sweep of coordinate descent and scales again, at the end: each further one costs as much as GPTQ itself.
REFINEMENTS = 1
# Numbers of a weight that are worked on at once, some rows after others: half a dozen copies of them are made.
_MAX_NUMBERS = 2**22

SETTINGS = {
    "damping": f"in_features / (2 · tokens), within {DAMPING} and {_LARGEST_DEFAULT_DAMPING}",
    "activation_order": "static groups",
    "grid": "searched, weighted with the Hessian's diagonal",
    "refinements": REFINEMENTS,
}


@dataclass(frozen=True)
class Hessian:
    """H = E[x x^T], damped, and what GPTQ needs of it. At the inputs of a large model each of the two matrices takes
    hundreds of megabytes: nothing here copies one.

    The order decides only what is rounded when: groups keep their columns ("static groups"), and nothing of it is
    stored.
    """

    matrix: Tensor  # [in, in], float32, as the weight's columns lie
    feedback: Tensor  # U of H = U D U^T, [in, in], float32, its columns in the order in which GPTQ rounds them
    order: Tensor  # [in], column at each place of that order: the largest diagonal first
    dead: Tensor  # [in], bool: columns whose input is always zero
    damping: float  # as a share of the mean diagonal
    ridge: float  # the same, as it was added to the diagonal

    def output_errors(self, delta: Tensor) -> Tensor:
        """E|delta x|^2 of each row of a [out, in] difference, [out]: damping and dead columns left out."""
        delta = delta.masked_fill(self.dead, 0)
        return (row_errors(delta, self) - self.ridge * delta.square().sum(-1)).clamp_(min=0)


def default_damping(in_features: int, num_tokens: int) -> float:
    """Half the inputs for each token, within 0.01 (the paper's) and 0.1: what few tokens say of many inputs is partly
    noise, and rounding fits it.

    On 8192 tokens of SmolLM2-135M the error on other text, at 3 bits, was at a damping of 0.1 against one of 0.01: down
    (1536 inputs) 13 and 7 % less in layers 1 and 16, gate and up (576) 3 and 4 % less, o 3 % more and 4 % less, q, k, v
    5 and 4 % more, where a few inputs stand out and the mean diagonal is theirs.
    """
    return min(max(DAMPING, in_features / (2 * max(num_tokens, 1))), _LARGEST_DEFAULT_DAMPING)


def factorize(
    gram: Tensor, damping: float = DAMPING, in_activation_order: bool = True, *, owns_gram: bool = False
) -> Hessian | None:
    """Damp and factorize E[x x^T] ([in, in], float32). None: not even a damping of 1 makes it positive definite.

    A dead column (zero diagonal) gets the mean diagonal of the others, and touches none of them. Where the Cholesky
    fails in float32 it is tried in float64, and then with ten times the damping. owns_gram: it may be changed, and the
    result hold it.
    """
    matrix = gram if owns_gram else gram.clone()
    diagonal = matrix.diagonal().clone()
    dead = diagonal <= 0
    mean = float(diagonal[~dead].mean()) if bool((~dead).any()) else 1.0
    diagonal = torch.where(dead, mean, diagonal)
    order = torch.arange(len(matrix), device=matrix.device)
    if in_activation_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    if not all(bool(torch.isfinite(rows).all()) for rows in matrix.split(BLOCK_COLUMNS)):
        return None
    while True:
        ridge = damping * mean
        matrix.diagonal().copy_(diagonal + ridge)
        for dtype in (torch.float32, torch.float64):
            if (feedback := _unit_upper(matrix, order, dtype)) is not None:
                return Hessian(matrix, feedback, order, dead, damping, ridge)
        if damping >= _MAX_DAMPING:
            return None
        damping = min(max(damping, 1e-6) * _DAMPING_STEP, _MAX_DAMPING)


def _unit_upper(matrix: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor | None:
    """U of matrix = U D U^T, columns in `order`: the Cholesky factor of the matrix read backwards. float32."""
    backwards = order.flip(0)
    factor = torch.empty_like(matrix, dtype=dtype)
    for start in range(0, len(order), BLOCK_COLUMNS):
        rows = backwards[start : start + BLOCK_COLUMNS]
        factor[start : start + len(rows)] = matrix[rows][:, backwards]
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(factor, out=(factor, info))
    if int(info):
        return None
    _reverse_in_place(factor)
    factor = factor.to(torch.float32)
    factor /= factor.diagonal().clone()
    return factor if all(bool(torch.isfinite(rows).all()) for rows in factor.split(BLOCK_COLUMNS)) else None


def _reverse_in_place(matrix: Tensor) -> None:
    """matrix[i, j] -> matrix[n - 1 - i, n - 1 - j], some rows at a time."""
    n = len(matrix)
    for start in range(0, n // 2, BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, n // 2)
        upper = matrix[start:stop].flip(0, 1)
        matrix[start:stop] = matrix[n - stop : n - start].flip(0, 1)
        matrix[n - stop : n - start] = upper
    if n % 2:
        matrix[n // 2] = matrix[n // 2].flip(0)


@dataclass(frozen=True)
class Rounded:
    """q [out, in] on a grid."""

    q: Tensor
    grid: Grid

    @property
    def weight(self) -> Tensor:
        return self.grid.values(self.q)

    def rows(self, rows: slice) -> "Rounded":
        return Rounded(self.q[rows], self.grid.rows(rows))


def gptq(
    weight: Tensor,
    hessian: Hessian,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    refinements: int = REFINEMENTS,
) -> Rounded:
    """Round a [out, in] float32 weight: search the grid, GPTQ, then `refinements` rounds of sweep and scales again.

    Dead columns become zero, as in the paper's code: whatever they hold never reaches an output that was seen, and a
    large one would widen the grid of its neighbours.
    """
    num_rows = max(1, _MAX_NUMBERS // weight.shape[1])
    parts = [_gptq_rows(rows, hessian, scheme, scale_dtype, refinements) for rows in weight.split(num_rows)]
    if len(parts) == 1:
        return parts[0]
    zeros = None if parts[0].grid.zero is None else torch.cat([part.grid.zero for part in parts])
    return Rounded(
        torch.cat([part.q for part in parts]), Grid(scheme, torch.cat([part.grid.scale for part in parts]), zeros)
    )


def _gptq_rows(
    weight: Tensor, hessian: Hessian, scheme: WeightScheme, scale_dtype: torch.dtype, refinements: int
) -> Rounded:
    weight = weight.masked_fill(hessian.dead, 0)
    grid = searched_grid(weight, scheme, scale_dtype, hessian.matrix.diagonal())
    q = round_with_feedback(weight, hessian, grid)
    for _ in range(refinements):
        q = sweep(weight, hessian, grid, q)
        grid = refit_scales(weight, hessian.matrix, grid, q, scale_dtype)
    return Rounded(q, grid)


def round_with_feedback(weight: Tensor, hessian: Hessian, grid: Grid) -> Tensor:
    """GPTQ proper: q [out, in] of a weight whose grid is given. Blocks of columns, rows side by side."""
    columns = _Columns(weight, grid, hessian.order)
    target = columns.weight.clone()  # what is left to round: the weight and the errors that it takes up
    q, error = torch.empty_like(target), torch.empty_like(target)
    for start in range(0, len(target), BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, len(target))
        feedback = hessian.feedback[:stop, start:stop]
        target[start:stop].addmm_(feedback[:start].T, error[:start])
        for k in range(start, stop):
            q[k] = columns.nearest(k, target[k])
            error[k] = columns.weight[k] - columns.value(k, q[k])
            target[k + 1 : stop].addr_(feedback[k, k + 1 - start :], error[k])
    return columns.restore(q)


def sweep(weight: Tensor, hessian: Hessian, grid: Grid, q: Tensor) -> Tensor:
    """One pass of coordinate descent over all columns as they lie: q [out, in] -> q, its error no larger in any row.

    With R = H (W - W')^T, the best value of column k given the rest is W'_k + R_k / H_kk.
    """
    matrix = hessian.matrix
    columns = _Columns(weight, grid, torch.arange(len(matrix), device=matrix.device))
    curvature = matrix.diagonal().tolist()
    q = columns.reorder(q)
    values = columns.value(slice(None), q)
    residual = matrix @ (columns.weight - values)
    for start in range(0, len(q), BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, len(q))
        block = matrix[start:stop, start:stop]
        moved, local = torch.empty_like(q[start:stop]), residual[start:stop].clone()
        for k in range(start, stop):
            q[k] = columns.nearest(k, values[k] + local[k - start] / curvature[k])
            new = columns.value(k, q[k])
            moved[k - start] = new - values[k]
            values[k] = new
            local[k + 1 - start :].addr_(block[k - start, k + 1 - start :], moved[k - start], alpha=-1)
        residual.addmm_(matrix[:, start:stop], moved, alpha=-1)
    return columns.restore(q)


def row_errors(delta: Tensor, hessian: Hessian) -> Tensor:
    """delta H delta^T of each row of a [out, in] difference, [out]: what GPTQ makes small."""
    return quadratic_form(delta, hessian.matrix)


class _Columns:
    """A weight's columns as rows, [in, out], in an order, each with its own scale and zero."""

    def __init__(self, weight: Tensor, grid: Grid, order: Tensor) -> None:
        self.order, self.bounds = order, grid.bounds
        group = self.order // grid.grouped(weight).shape[-1]
        self.weight = self.reorder(weight)
        self.scale = grid.scale.T[group]
        self.zero = None if grid.zero is None else grid.zero.T[group]

    def reorder(self, matrix: Tensor) -> Tensor:
        return matrix.T[self.order]

    def restore(self, columns: Tensor) -> Tensor:
        return torch.empty_like(columns).index_copy_(0, self.order, columns).T.contiguous()

    def nearest(self, k: int, values: Tensor) -> Tensor:
        q = values / self.scale[k]
        if self.zero is not None:
            q += self.zero[k]
        return q.round_().clamp_(*self.bounds)

    def value(self, k: int | slice, q: Tensor) -> Tensor:
        return (q if self.zero is None else q - self.zero[k]) * self.scale[k]
