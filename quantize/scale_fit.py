"""Scales of least error for integers that are given: a rounded weight is linear in them."""

import torch
from torch import Tensor

from llmq.quantize.rounding import Grid

# Numbers of the normal equations at once, [rows, num_groups, num_groups] in float64: 32 MiB.
_MAX_NORMAL_NUMBERS = 2**22


def refit_scales(weight: Tensor, gram: Tensor, grid: Grid, q: Tensor, scale_dtype: torch.dtype) -> Grid:
    """`grid` with the scales that make E|(W' - W)x|^2 least for integers q [out, in]; gram: E[x x^T], [in, in].

    For each row a least squares in its groups' scales s. With u_g the row's q - zero in group g and zeros elsewhere,
    and w' the row as it is now, the change d of s solves (u_g^T gram u_h) d = u_g^T gram (w - w'). A row keeps its old
    scales where the new ones, rounded to `scale_dtype`, are no better; a group where its new one is not positive.
    """
    num_rows = max(1, _MAX_NORMAL_NUMBERS // grid.scale.shape[1] ** 2)
    parts = [
        _refit_rows(weight[rows], gram, grid.rows(rows), q[rows], scale_dtype)
        for rows in (slice(start, start + num_rows) for start in range(0, len(q), num_rows))
    ]
    return Grid(grid.scheme, torch.cat(parts), grid.zero)


def _refit_rows(weight: Tensor, gram: Tensor, grid: Grid, q: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """The scales, [rows, num_groups]."""
    units = grid.centred(q)  # [out, num_groups, size]
    num_groups, size = units.shape[1:]
    normal = torch.empty(len(q), num_groups, num_groups, device=q.device)
    for group in range(num_groups):
        product = units[:, group] @ gram[group * size : (group + 1) * size]
        normal[:, group] = (product.view(units.shape) * units).sum(-1)
    residual = (weight - grid.values(q)) @ gram
    right = (residual.view(units.shape) * units).sum(-1).to(torch.float64)
    normal = normal.to(torch.float64)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal.copy_(torch.where(diagonal > 0, diagonal * (1 + 1e-6), 1))  # a group of zeros: no change, `right` is zero
    change, info = torch.linalg.solve_ex(normal, right.unsqueeze(-1))
    new = grid.with_scale(grid.scale + change.squeeze(-1).to(torch.float32), scale_dtype)
    change = (new.scale - grid.scale).to(torch.float64)
    gain = (change * (2 * right - (normal @ change.unsqueeze(-1)).squeeze(-1))).sum(-1)
    better = (gain > 0) & (info == 0)
    return torch.where(better.unsqueeze(-1), new.scale, grid.scale)
