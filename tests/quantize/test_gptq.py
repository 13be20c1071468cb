"""GPTQ against a naive loop from the paper's equations, and what must not break it."""

import itertools

import pytest
import torch

from llmq.quantize import hessian as hessian_module
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.gptq import gptq, round_with_feedback, sweep
from llmq.quantize.hessian import default_damping, factorize
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


def damped(hessian):
    """H in float64."""
    lower = hessian.packed.tril().double()
    return lower + lower.tril(-1).T


def row_errors(delta, hessian):
    """What GPTQ makes small, [out]."""
    return torch.einsum("oi,ij,oj->o", delta.double(), damped(hessian), delta.double())


def swept(weight, hessian, grid, q, scale_dtype=torch.bfloat16):
    residual = hessian.times((weight - grid.values(q)).T)
    return sweep(hessian, grid, q, residual, scale_dtype)


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
    q, _ = round_with_feedback(weight, hessian, grid)
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
    delta = grid.values(round_with_feedback(weight, hessian, grid)[0]) - weight
    plain = grid.values(grid.nearest(weight)) - weight
    assert row_errors(delta, hessian).sum() < 0.6 * row_errors(plain, hessian).sum()
    expected = torch.einsum("oi,ij,oj->o", delta, gram, delta)
    assert torch.allclose(hessian.output_errors(delta), expected, rtol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_a_sweep_and_new_scales_lower_the_error_of_every_row(scheme):
    weight, gram = case(seed=1)
    hessian = factorize(gram)
    grid = range_grid(weight, scheme, torch.bfloat16, 0.8)
    q, _ = round_with_feedback(weight, hessian, grid)
    errors = [row_errors(grid.values(q) - weight, hessian)]
    for _ in range(2):
        q, grid = swept(weight, hessian, grid, q)
        errors.append(row_errors(grid.values(q) - weight, hessian))
        assert torch.equal(grid.scale, grid.scale.bfloat16().float())
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-4)).all()
    assert errors[-1].sum() < errors[0].sum() * (0.97 if scheme.bits < 8 else 1)


def test_a_sweep_leaves_no_column_that_could_be_better_alone():
    weight, gram = case(num_columns=64, num_rows=8)
    hessian = factorize(gram)
    grid = searched_grid(weight, G32, torch.float32)
    q, _ = round_with_feedback(weight, hessian, grid)
    for _ in range(20):
        q, grid = swept(weight, hessian, grid, q, torch.float32)
    best = row_errors(grid.values(q) - weight, hessian)
    for column in range(64):
        for step in (-1, 1):
            other = q.clone()
            other[:, column] = (other[:, column] + step).clamp(*grid.bounds)
            assert (row_errors(grid.values(other) - weight, hessian) >= best * (1 - 1e-4)).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_last_group_leaves_a_sweep_with_the_scale_of_least_error(symmetric):
    weight, gram = case(num_columns=192, num_rows=5)
    hessian = factorize(gram)
    scheme = WeightScheme("int", 3, "group", 64, symmetric=symmetric)
    grid = range_grid(weight, scheme, torch.float32, 0.7)
    q, grid = swept(weight, hessian, grid, grid.nearest(weight), torch.float32)
    others = torch.cat([grid.values(q)[:, :128], torch.zeros(5, 64)], 1)
    units = torch.cat([torch.zeros(5, 128), grid.centred(q)[:, -1]], 1).double()
    matrix, rest = damped(hessian), (weight - others).double()
    expected = torch.einsum("oi,ij,oj->o", units, matrix, rest) / torch.einsum("oi,ij,oj->o", units, matrix, units)
    assert torch.allclose(grid.scale[:, -1].double(), expected, rtol=1e-4)


def test_refitted_scales_are_the_least_squares_of_the_integers():
    weight, gram = case(num_columns=64, num_rows=3)
    hessian = factorize(gram)
    grid = range_grid(weight, G32, torch.float32, 0.7)
    q = grid.nearest(weight)
    new = refit_scales(weight, damped(hessian).float(), grid, q, torch.float32)
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

    torch.manual_seed(3)
    weight, x = torch.randn(7, 32), torch.randn(200, 32)
    scheme = WeightScheme("int", 3, "group", 16, symmetric=False)
    hessian = factorize(x.T @ x / len(x))
    whole = gptq(weight, hessian, scheme, torch.bfloat16)
    monkeypatch.setattr(module, "MAX_NUMBERS", 3 * 32)
    pieces = gptq(weight, hessian, scheme, torch.bfloat16)
    assert torch.equal(whole.q, pieces.q)
    torch.testing.assert_close(whole.weight, pieces.weight)


@pytest.mark.parametrize("in_activation_order", [True, False])
@pytest.mark.parametrize("num_columns", [128, 300])
def test_one_matrix_holds_the_hessian_and_its_factors(num_columns, in_activation_order):
    _, gram = case(num_columns=num_columns)
    kept = gram.clone()
    hessian = factorize(gram, 0.01, in_activation_order)
    assert torch.equal(gram, kept)
    assert factorize(kept, owns_gram=True).packed.data_ptr() == kept.data_ptr()
    expected = gram + 0.01 * gram.diagonal().mean() * torch.eye(num_columns)
    assert torch.allclose(damped(hessian).float(), expected)
    assert torch.allclose(hessian.diagonal, expected.diagonal())
    upper = hessian.packed.triu(1).double() + torch.eye(num_columns)
    product = upper @ torch.diag(hessian.pivots.double()) @ upper.T
    ordered = expected[hessian.order][:, hessian.order].double()
    assert torch.allclose(product, ordered, atol=1e-4 * float(ordered.diagonal().max()))


def test_products_with_what_is_packed_are_those_of_the_matrix():
    _, gram = case(num_columns=300)
    hessian = factorize(gram)
    columns = torch.randn(300, 5)
    assert torch.allclose(hessian.times(columns), damped(hessian).float() @ columns, rtol=1e-3, atol=1e-3)
    assert torch.equal(hessian.as_they_lie(columns[hessian.order]), columns)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_what_was_off_at_each_column_gives_the_error_and_the_residual(scheme):
    weight, gram = case(num_columns=320)
    hessian = factorize(gram)
    grid = range_grid(weight, scheme, torch.bfloat16)
    q, slack = round_with_feedback(weight, hessian, grid)
    delta = weight - grid.values(q)
    assert torch.allclose(
        (hessian.pivots[:, None] * slack.square()).sum(0), row_errors(delta, hessian).float(), rtol=1e-3
    )
    residual = hessian.times(delta.T)
    made = hessian.as_they_lie(hessian.times_factors(slack))
    assert torch.allclose(made, residual, atol=1e-4 * float(residual.abs().max()))


def test_a_factor_in_float64_is_that_of_float32_and_leaves_the_hessian():
    _, gram = case(num_columns=200)
    single, double = gram.clone(), gram.clone()
    order = torch.randperm(200)
    for matrix in (single, double):
        matrix.diagonal().add_(0.1)
    pivots = hessian_module._factor_above_diagonal(single, order, torch.float32)
    torch.testing.assert_close(hessian_module._factor_above_diagonal(double, order, torch.float64), pivots)
    torch.testing.assert_close(double, single, rtol=1e-3, atol=1e-5)
    assert torch.equal(double.tril(-1), gram.tril(-1))
