"""The Hessian of a linear's squared output error, damped and factorized in the memory it came in.

With H = E[x x^T], the error of a row that moves by e is e^T H e. GPTQ reads two things of it: H itself, and the factors
of H = U D U^T, U upper triangular with ones on its diagonal, columns in the order in which they are rounded. At the
inputs of a large model a square matrix takes hundreds of megabytes. H is symmetric and U triangular: one holds both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.01  # of the Hessian's mean diagonal: the paper's, and the least that is taken
LARGEST_DEFAULT_DAMPING = 0.1
# A failed factorization raises the damping by this factor, until it exceeds _MAX_DAMPING.
_DAMPING_STEP = 10.0
_MAX_DAMPING = 1.0
# Columns that are worked on together: the paper's lazy batches (section 3.3, step 2), and blocks of the factorization.
BLOCK_COLUMNS = 128


@dataclass(frozen=True)
class Hessian:
    """H = E[x x^T], damped, and U and D of H = U D U^T.

    The order of U decides only what is rounded when: groups keep their columns ("static groups"), and nothing of it is
    stored. H is as the weight's columns lie.
    """

    packed: Tensor  # [in, in], float32: H below the diagonal and on it; above it U, in the order of rounding
    pivots: Tensor  # D, [in], in the order: what is left of a column's curvature while those after it can still move
    order: Tensor  # [in], column of the weight at each place of the order: the largest diagonal first
    dead: Tensor  # [in], bool: columns whose input is always zero
    damping: float  # as a share of the mean diagonal
    ridge: float  # the same, as it was added to the diagonal

    @property
    def diagonal(self) -> Tensor:
        """H's, [in]."""
        return self.packed.diagonal()

    def as_they_lie(self, columns: Tensor) -> Tensor:
        """[in, n], its rows in the order of rounding -> the same as the weight's columns lie."""
        return torch.empty_like(columns).index_copy_(0, self.order, columns)

    def times_factors(self, slack: Tensor) -> Tensor:
        """U D slack, [in, n] in the order of rounding."""
        scaled = slack * self.pivots[:, None]
        product = scaled.clone()
        for block in blocks_of(self.packed):
            product[block] += self.packed[block, block].triu(1) @ scaled[block]
            product[block].addmm_(self.packed[block, block.stop :], scaled[block.stop :])
        return product

    def block(self, block: slice) -> Tensor:
        """H among the columns of a block, [n, n]."""
        lower = self.packed[block, block].tril()
        return lower + lower.tril(-1).T

    def times(self, columns: Tensor) -> Tensor:
        """H columns, [in, n]."""
        product = torch.zeros_like(columns)
        for block in blocks_of(self.packed):
            before = self.packed[block, : block.start]
            product[: block.start].addmm_(before.T, columns[block])
            product[block].addmm_(before, columns[: block.start])
            product[block].addmm_(self.block(block), columns[block])
        return product

    def output_errors(self, delta: Tensor) -> Tensor:
        """E|delta x|^2 of each row of a [out, in] difference, [out]: damping and dead columns left out."""
        columns = delta.masked_fill(self.dead, 0).T.contiguous()
        total = torch.zeros_like(columns[0])
        for block in blocks_of(self.packed):
            own = columns[block]
            product = self.block(block) @ own
            product.addmm_(self.packed[block, : block.start], columns[: block.start], alpha=2)
            total += (product * own).sum(0)
        return (total - self.ridge * columns.square().sum(0)).clamp_(min=0)


def blocks_of(matrix: Tensor, num_rows: int = BLOCK_COLUMNS) -> Iterator[slice]:
    """Its rows, some at a time."""
    return (slice(start, min(start + num_rows, len(matrix))) for start in range(0, len(matrix), num_rows))


def default_damping(in_features: int, num_tokens: int) -> float:
    """Half the inputs for each token, within 0.01 (the paper's) and 0.1: what few tokens say of many inputs is partly
    noise, and rounding fits it.

    On 8192 tokens of SmolLM2-135M the error on other text, at 3 bits, was at a damping of 0.1 against one of 0.01: down
    (1536 inputs) 13 and 7 % less in layers 1 and 16, gate and up (576) 3 and 4 % less, o 3 % more and 4 % less, q, k, v
    5 and 4 % more, where a few inputs stand out and the mean diagonal is theirs.
    """
    return min(max(DAMPING, in_features / (2 * max(num_tokens, 1))), LARGEST_DEFAULT_DAMPING)


def factorize(
    gram: Tensor, damping: float = DAMPING, in_activation_order: bool = True, *, owns_gram: bool = False
) -> Hessian | None:
    """Damp and factorize E[x x^T] ([in, in], float32). None: not even a damping of 1 makes it positive definite.

    A dead column (zero diagonal) gets the mean diagonal of the others, and touches none of them. What fails in float32
    is tried in float64, and then with ten times the damping. owns_gram: it may be changed, and the result hold it.
    """
    if not all(bool(torch.isfinite(gram[block]).all()) for block in blocks_of(gram)):
        return None
    packed = gram if owns_gram else gram.clone()
    diagonal = packed.diagonal().clone()
    dead = diagonal <= 0
    mean = float(diagonal[~dead].mean()) if bool((~dead).any()) else 1.0
    diagonal = torch.where(dead, mean, diagonal)
    order = torch.arange(len(packed), device=packed.device)
    if in_activation_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    while True:
        ridge = damping * mean
        packed.diagonal().copy_(diagonal + ridge)
        for dtype in (torch.float32, torch.float64):
            if (pivots := _factor_above_diagonal(packed, order, dtype)) is not None:
                return Hessian(packed, pivots, order, dead, damping, ridge)
        if damping >= _MAX_DAMPING:
            return None
        damping = min(max(damping, 1e-6) * _DAMPING_STEP, _MAX_DAMPING)


def _factor_above_diagonal(packed: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Put U of H = U D U^T, columns in `order`, above the diagonal of `packed`; H is read from below. Returns D; None
    where H is not positive definite in `dtype`.

    Blocks of columns from the last to the first: what those behind a block explain of it is subtracted from H, and what
    is left has the factors of the block.
    """
    work = packed if dtype == packed.dtype else torch.empty_like(packed, dtype=dtype)
    pivots = torch.empty(len(packed), dtype=dtype, device=packed.device)
    for block in reversed(list(blocks_of(packed))):
        left = _symmetric_part(packed, order[: block.stop], order[block]).to(dtype)
        behind = work[block, block.stop :] * pivots[block.stop :]
        left.addmm_(work[: block.stop, block.stop :], behind.T, alpha=-1)
        # The Cholesky factor of the block read backwards is upper triangular as it lies.
        factor, info = torch.linalg.cholesky_ex(left[block].flip(0, 1))
        if int(info) or not bool(torch.isfinite(left).all()):
            return None
        factor = factor.flip(0, 1)
        root = factor.diagonal()
        pivots[block] = root.square()
        above = torch.linalg.solve_triangular(factor.T, left[: block.start], upper=False, left=False)
        work[: block.start, block] = above / root
        _set_above(work[block, block], factor / root)
    if work is not packed:
        for block in blocks_of(packed):
            _set_above(packed[block, block], work[block, block].to(packed.dtype))
            packed[block, block.stop :] = work[block, block.stop :]
    return pivots.to(packed.dtype)


def _symmetric_part(lower: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Rows and columns of a symmetric matrix that has its numbers on and below the diagonal."""
    rows, columns = rows[:, None], columns[None]
    return lower[torch.maximum(rows, columns), torch.minimum(rows, columns)]


def _set_above(matrix: Tensor, values: Tensor) -> None:
    """The numbers above the diagonal, in place."""
    matrix.copy_(matrix.tril() + values.triu(1))
