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
- scales again: given the integers, W' is linear in the scales. Each group's gets its least error in the sweep, behind
  the group's last column, where the residual that it needs is at hand.

Tried on SmolLM2-135M, the mean over 8 inputs of layers 1 and 16 of E|dy|^2 as a share of round to nearest's (3 bits,
groups of 64, asymmetric, 8192 tokens; range: the grid reaches from least to largest weight):

    GPTQ on the range grid                  0.279
    … on the grid of least squared error    0.260
    … weighted with the Hessian's diagonal  0.250   (with its diagonal blocks 0.252, and zeros searched too 0.252)
    and two sweeps                          0.234
    and scales again                        0.230
    and twice a sweep and scales again      0.225   (each round costs what GPTQ itself does)

There the scales of a row were fitted all together, after the sweep. The same share on other text than the calibration's
(test file; the dithered model of tests/bench, 16384 tokens), at 3 and at 4 bits:

    GPTQ                                                                      0.322   0.369
    and a sweep, and a row's scales together                                  0.310   0.356
    and a sweep with each group's scale in it                                 0.311   0.356
    the same, rounding group after group, that of the largest diagonal first  0.314   0.360

Tried and left out, by the KL divergence of the whole model with its first 6 layers at 3 bits (4096 tokens of
calibration, measured on 2044 others; two runs that differ in nothing that matters are 4 % apart):

    GPTQ on the range grid                                                    0.138
    all of the above                                                          0.108
    AWQ's scales before it                                                    0.118
    the outputs for the unquantized model's inputs as target (GPTAQ, Li et    0.141
    al., arXiv 2504.02692), and half way to them                              0.108
    tokens weighted with the inverse square of their residual stream          0.120

Stage after stage of a layer (q/k/v, o, gate/up, down) gave 0.212 in 14 layers, all at once 0.215.

Of the whole model at 4 bits (groups of 64, asymmetric), KL divergence and perplexity on 8188 other tokens, by how much
a sample's first token weighs (`layer_work.FIRST_TOKEN_SHARE`), and by rounds of sweep and scales again:

    32 samples of 512 tokens    as one of 512                     0.112   27.09
                                as 4                              0.099   26.77
                                as 16                             0.097   26.45 (another run 0.100, 26.68)
                                as 64, on half of that text       0.098         (as one 0.100, as 16 0.088)
                                as 16, and twice scales again     0.093   26.38
                                as 16, and four times             0.096   26.36
    112 samples of 512          as one                            0.104   26.95
    28 samples of 2048          as one                            0.137   28.07 (damped by 0.05: 4 % less)
                                as 4                              0.116   27.60
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.hessian import BLOCK_COLUMNS, DAMPING, LARGEST_DEFAULT_DAMPING, Hessian, blocks_of
from llmq.quantize.layer_work import FIRST_TOKEN_SHARE
from llmq.quantize.rounding import Grid, searched_grid, stored_scale

# Rounds of a sweep of coordinate descent and scales again, at the end.
REFINEMENTS = 2
# Numbers of a weight that are worked on at once, some rows after others: half a dozen copies of them are made.
MAX_NUMBERS = 2**21

SETTINGS = {
    "first_token": f"at least {FIRST_TOKEN_SHARE} of a sample's weight",
    "damping": f"in_features / (2 · tokens), within {DAMPING} and {LARGEST_DEFAULT_DAMPING}",
    "activation_order": "static groups",
    "grid": "searched, weighted with the Hessian's diagonal",
    "refinements": REFINEMENTS,
}


@dataclass(frozen=True)
class Rounded:
    """q [out, in], int8, on a grid."""

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
    num_rows = max(1, MAX_NUMBERS // weight.shape[1])
    importance = hessian.diagonal
    parts = []
    for rows in weight.split(num_rows):
        rows = rows.masked_fill(hessian.dead, 0)
        grid = searched_grid(rows, scheme, scale_dtype, importance)
        parts.append(_round_rows(rows, hessian, grid, scale_dtype, refinements))
    return Rounded(torch.cat([part.q for part in parts]), Grid.cat([part.grid for part in parts]))


def _round_rows(weight: Tensor, hessian: Hessian, grid: Grid, scale_dtype: torch.dtype, refinements: int) -> Rounded:
    q, slack = round_with_feedback(weight, hessian, grid)
    for number in range(refinements):
        if number:
            residual = hessian.times((weight - grid.values(q)).T.contiguous())
        else:
            # slack is U^T (W - W')^T: one triangular product is left of H (W - W')^T.
            residual = hessian.as_they_lie(hessian.times_factors(slack))
            del slack
        q, grid = sweep(hessian, grid, q, residual, scale_dtype)
    return Rounded(q.to(torch.int8), grid)


def round_with_feedback(weight: Tensor, hessian: Hessian, grid: Grid) -> tuple[Tensor, Tensor]:
    """GPTQ proper, on a grid that is given: q [out, in], and what each column still was off its target when it was
    rounded, [in, out] in the order of rounding: with D, the error is the sum of D · that^2.

    Blocks of columns, rows side by side.
    """
    columns, original = _Columns(grid, hessian.order), weight.T[hessian.order]
    target = original.clone()  # what is left to round: the weight and the errors that it takes up
    q, error = torch.empty_like(target), torch.empty_like(target)
    for block in blocks_of(target):
        target[block].addmm_(hessian.packed[: block.start, block].T, error[: block.start])
        feedback = hessian.packed[block, block]
        for k in range(block.start, block.stop):
            ahead = feedback[k - block.start, k - block.start + 1 :]
            q[k] = columns.nearest(k, target[k])
            value = columns.value(k, q[k])
            torch.sub(original[k], value, out=error[k])
            target[k + 1 : block.stop].addr_(ahead, error[k])
            target[k] -= value
    return hessian.as_they_lie(q).T.contiguous(), target


def sweep(hessian: Hessian, grid: Grid, q: Tensor, residual: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Grid]:
    """One pass of coordinate descent, columns as they lie: q [out, in] and its grid -> the same, the error no larger in
    any row.

    residual: R = H (W - W')^T, [in, out]; it is worked on. The best value of column k given all others is
    W'_k + R_k / H_kk. Behind the last column of a group its scale moves by u^T R / u^T H u, with u the group's
    q - zero: the least error, for W' is linear in it. Groups of more than BLOCK_COLUMNS columns keep their scales.
    """
    group_size = q.shape[1] // grid.scale.shape[1]
    columns = _Columns(grid, torch.arange(q.shape[1], device=q.device))
    curvature = hessian.diagonal.tolist()
    q = q.T.contiguous()
    fits_scales = group_size <= BLOCK_COLUMNS
    num_columns = BLOCK_COLUMNS // group_size * group_size if fits_scales else BLOCK_COLUMNS
    for block in blocks_of(q, num_columns):
        among = hessian.block(block)
        local, moved = residual[block], torch.empty_like(residual[block])
        for k in range(block.start, block.stop):
            own = k - block.start
            old = columns.value(k, q[k])
            q[k] = columns.nearest(k, old + local[own] / curvature[k])
            torch.sub(columns.value(k, q[k]), old, out=moved[own])
            first = own - own % group_size if fits_scales else own + 1  # the columns whose residual is looked at again
            local[first:].addr_(among[own, first:], moved[own], alpha=-1)
            if fits_scales and (k + 1) % group_size == 0:
                group = slice(first, own + 1)
                units = columns.centred(slice(k + 1 - group_size, k + 1), q)
                step = units * _fit_scale(columns, k, units, local[group], among[group, group], scale_dtype)
                moved[group] += step
                local.addmm_(among[:, group], step, alpha=-1)
        residual[block.stop :].addmm_(hessian.packed[block.stop :, block], moved, alpha=-1)
    return q.T.contiguous(), Grid(grid.scheme, columns.scale.T.contiguous(), grid.zero)


def _fit_scale(
    columns: "_Columns", k: int, units: Tensor, residual: Tensor, among: Tensor, scale_dtype: torch.dtype
) -> Tensor:
    """Give the group of column k its scale of least error, where one that `scale_dtype` holds is better; by how much it
    moved, [out].
    """
    slope, curvature = (units * residual).sum(0), (units * (among @ units)).sum(0)
    old = columns.scale[columns.group[k]].clone()
    best = old + slope / curvature.clamp(min=torch.finfo(curvature.dtype).tiny)
    new = stored_scale(best, scale_dtype)
    change = new - old
    is_better = (best > 0) & torch.isfinite(new) & (change * (2 * slope - change * curvature) > 0)
    columns.scale[columns.group[k]] = new = torch.where(is_better, new, old)
    return new - old


class _Columns:
    """What the columns of a weight, in an order, are rounded on: each on its group's scales and zeros."""

    def __init__(self, grid: Grid, order: Tensor) -> None:
        self.bounds = grid.bounds
        self.scale = grid.scale.T.clone(memory_format=torch.contiguous_format)  # [num_groups, out]
        self.zero = None if grid.zero is None else grid.zero.T.contiguous()
        self.group = (order // (len(order) // len(self.scale))).tolist()

    def nearest(self, k: int, values: Tensor) -> Tensor:
        group = self.group[k]
        q = values / self.scale[group]
        if self.zero is not None:
            q += self.zero[group]
        return q.round_().clamp_(*self.bounds)

    def value(self, k: int, q: Tensor) -> Tensor:
        group = self.group[k]
        return (q if self.zero is None else q - self.zero[group]) * self.scale[group]

    def centred(self, group: slice, q: Tensor) -> Tensor:
        """q - zero of the columns of one group, [group_size, out]."""
        q = q[group]
        return q.clone() if self.zero is None else q - self.zero[self.group[group.start]]
