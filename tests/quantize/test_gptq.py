"""GPTQ against a naive loop from the paper's equations, and what must not break it."""

import itertools

import pytest
import torch

from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.gptq import default_damping, factorize, gptq, round_with_feedback, row_errors, sweep
from llmq.quantize.rounding import Grid, range_grid, searched_grid
from llmq.quantize.scale_fit import refit_scales

G32 = WeightScheme("int", 4, "group", 32, symmetric=False)
SCHEMES = [
    G32,
    WeightScheme("int", 3, "group", 16, symmetric=False),
    WeightScheme("int", 4, "group", 64, symmetric=True),
    WeightScheme("int", 3, "channel", symmetric=True),
    WeightScheme("int", 8, "channel", layout="int-quantized"),
]


def case(num_columns=192, num_rows=24, num_tokens=512, seed=0):
    """A weight and E[x x^T] of correlated inputs, a few of which stand out."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(num_columns, num_columns, generator=generator) / num_columns**0.5
    x = torch.randn(num_tokens, num_columns, generator=generator) @ (mixing + 0.5 * torch.eye(num_columns))
    x[:, ::29] *= 8
    return torch.randn(num_rows, num_columns, generator=generator), x.T @ x / num_tokens


def naive_gptq(weight, gram, grid: Grid, damping, in_activation_order):
    """The paper's eqs. 2 and 3 in float64: after each column, all that are left are updated by the inverse Hessian of
    those left, which loses that column by Gaussian elimination.
    """
    weight, hessian = weight.double().clone(), gram.double().clone()
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True).tolist()
    left = order if in_activation_order else sorted(order)
    size = weight.shape[1] // grid.scale.shape[1]
    inverse = torch.linalg.inv(hessian)
    q = torch.zeros_like(weight)
    while left:
        column, *left = left
        scale = grid.scale[:, column // size].double()
        zero = 0 if grid.zero is None else grid.zero[:, column // size].double()
        q[:, column] = (weight[:, column] / scale + zero).round().clamp(*grid.bounds)
        error = (weight[:, column] - (q[:, column] - zero) * scale) / inverse[column, column]
        weight[:, left] -= error.unsqueeze(1) * inverse[column, left]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return q.float()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("in_activation_order", [True, False])
def test_the_blocked_loop_gives_the_integers_of_the_papers_equations(scheme, in_activation_order):
    weight, gram = case()
    grid = range_grid(weight, scheme, torch.bfloat16)
    hessian = factorize(gram, 0.01, in_activation_order)
    q = round_with_feedback(weight, hessian, grid)
    expected = naive_gptq(weight, gram, grid, 0.01, in_activation_order)
    # A tie that float32 breaks the other way moves what follows it in its row: rare, or it is a defect.
    same_rows = (q == expected).all(1).float().mean()
    assert same_rows > 0.9
    assert (q - expected).abs().max() <= 2
    assert bool((q != grid.nearest(weight)).any())


def test_the_error_is_that_of_the_output_and_below_rounding_to_nearest():
    weight, gram = case(num_columns=256)
    hessian = factorize(gram)
    grid = range_grid(weight, G32, torch.bfloat16)
    delta = grid.values(round_with_feedback(weight, hessian, grid)) - weight
    plain = grid.values(grid.nearest(weight)) - weight
    assert row_errors(delta, hessian).sum() < 0.6 * row_errors(plain, hessian).sum()
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(256)
    assert torch.allclose(row_errors(delta, hessian), torch.einsum("oi,ij,oj->o", delta, damped, delta), rtol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_a_sweep_and_new_scales_lower_the_error_of_every_row(scheme):
    weight, gram = case(seed=1)
    hessian = factorize(gram)
    grid = range_grid(weight, scheme, torch.bfloat16, 0.8)
    q = round_with_feedback(weight, hessian, grid)
    errors = [row_errors(grid.values(q) - weight, hessian)]
    for _ in range(2):
        q = sweep(weight, hessian, grid, q)
        errors.append(row_errors(grid.values(q) - weight, hessian))
        grid = refit_scales(weight, hessian.matrix, grid, q, torch.bfloat16)
        errors.append(row_errors(grid.values(q) - weight, hessian))
        assert torch.equal(grid.scale, grid.scale.bfloat16().float())
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-4)).all()
    assert errors[-1].sum() < errors[0].sum() * (0.97 if scheme.bits < 8 else 1)


def test_a_sweep_leaves_no_column_that_could_be_better_alone():
    weight, gram = case(num_columns=64, num_rows=8)
    hessian = factorize(gram)
    grid = searched_grid(weight, G32, torch.float32)
    q = round_with_feedback(weight, hessian, grid)
    for _ in range(20):
        q = sweep(weight, hessian, grid, q)
    best = row_errors(grid.values(q) - weight, hessian)
    for column in range(64):
        for step in (-1, 1):
            other = q.clone()
            other[:, column] = (other[:, column] + step).clamp(*grid.bounds)
            assert (row_errors(grid.values(other) - weight, hessian) >= best * (1 - 1e-4)).all()


def test_refitted_scales_are_the_least_squares_of_the_integers():
    weight, gram = case(num_columns=64, num_rows=3)
    hessian = factorize(gram)
    grid = range_grid(weight, G32, torch.float32, 0.7)
    q = grid.nearest(weight)
    new = refit_scales(weight, hessian.matrix, grid, q, torch.float32)
    root = torch.linalg.cholesky((gram + 0.01 * gram.diagonal().mean() * torch.eye(64)).double())
    for row in range(3):
        units = torch.zeros(64, 2, dtype=torch.float64)
        units[:32, 0], units[32:, 1] = grid.centred(q)[row].double()
        expected = torch.linalg.lstsq(root.T @ units, root.T @ weight[row].double()).solution
        assert torch.allclose(new.scale[row].double(), expected, rtol=1e-3)


def test_dead_columns_become_zero_and_leave_their_neighbours_as_if_they_had_been_zero():
    weight, gram = case()
    gram[5, :] = gram[:, 5] = 0
    weight[:, 5] = 100.0
    cleared = weight.clone()
    cleared[:, 5] = 0
    hessian = factorize(gram)
    assert hessian.dead.nonzero().flatten().tolist() == [5]
    rounded = gptq(weight, hessian, G32, torch.bfloat16)
    assert (rounded.weight[:, 5] == 0).all()
    assert torch.equal(rounded.q, gptq(cleared, hessian, G32, torch.bfloat16).q)
    assert torch.isfinite(rounded.weight).all()
    alive = rounded.weight - cleared
    expected = torch.einsum("oi,ij,oj->o", alive, gram, alive)
    assert torch.allclose(hessian.output_errors(rounded.weight - weight), expected, rtol=1e-2)


def test_a_hessian_of_fewer_tokens_than_columns_is_damped_until_it_factorizes():
    weight, gram = case(num_tokens=3)
    hessian = factorize(gram, damping=0.0)
    assert hessian.damping > 0
    assert torch.isfinite(gptq(weight, hessian, G32, torch.bfloat16).weight).all()
    assert factorize(gram, damping=0.01).damping == 0.01


def test_a_hessian_that_is_not_positive_definite_raises_the_damping_step_by_step():
    _, gram = case(num_columns=64)
    gram[3, 4] = gram[4, 3] = 1.05 * (gram[3, 3] * gram[4, 4]).sqrt()  # what no tokens have
    hessian = factorize(gram, damping=0.0001)
    assert hessian.damping > 0.0001
    gram[3, 4] = gram[4, 3] = 1e6
    assert factorize(gram) is None
    assert factorize(torch.full((8, 8), float("nan"))) is None


def test_damping_is_the_papers_with_many_tokens_and_grows_with_few():
    assert default_damping(576, 100_000) == 0.01
    assert default_damping(1536, 16_384) == pytest.approx(0.046875)
    assert default_damping(1536, 3) == default_damping(64, 0) == 0.1


def test_rows_taken_in_pieces_come_out_as_all_at_once(monkeypatch):
    from llmq.quantize import gptq as module
    from llmq.quantize import scale_fit

    torch.manual_seed(3)
    weight, x = torch.randn(7, 32), torch.randn(200, 32)
    scheme = WeightScheme("int", 3, "group", 16, symmetric=False)
    hessian = factorize(x.T @ x / len(x))
    whole = gptq(weight, hessian, scheme, torch.bfloat16)
    monkeypatch.setattr(module, "_MAX_NUMBERS", 3 * 32)
    monkeypatch.setattr(scale_fit, "_MAX_NORMAL_NUMBERS", 2 * 4)
    pieces = gptq(weight, hessian, scheme, torch.bfloat16)
    assert torch.equal(whole.q, pieces.q)
    torch.testing.assert_close(whole.weight, pieces.weight)


def test_factorizing_changes_a_matrix_only_where_it_may():
    x = torch.randn(100, 130)
    gram = x.T @ x / len(x)
    kept = gram.clone()
    hessian = factorize(gram)
    assert torch.equal(gram, kept)
    assert factorize(gram, owns_gram=True).matrix.data_ptr() == gram.data_ptr()
    upper = hessian.feedback
    assert torch.equal(upper, upper.triu())
    assert (upper.diagonal() == 1).all()
    # H = U D Uᵀ in the order of rounding, with D what is left of the diagonal.
    ordered = hessian.matrix[hessian.order][:, hessian.order].double()
    inner = torch.linalg.solve_triangular(upper.double(), ordered, upper=True)
    middle = torch.linalg.solve_triangular(upper.double(), inner.T, upper=True)
    assert torch.allclose(middle, torch.diag(middle.diagonal()), atol=1e-3 * float(middle.diagonal().max()))
