"""Grids and round to nearest."""

import pytest
import torch

from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.rounding import Grid, quantize_weight, range_grid, round_trip, saturated_share, searched_grid

G32 = WeightScheme("int", 4, "group", 32, symmetric=False)
SCHEMES = [
    G32,
    WeightScheme("int", 4, "group", 16, symmetric=True),
    WeightScheme("int", 3, "group", 32, symmetric=False),
    WeightScheme("int", 4, "channel", symmetric=False),
    WeightScheme("int", 8, "channel", layout="int-quantized"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_stored_is_what_the_search_saw(scheme, dtype):
    torch.manual_seed(1)
    weight = torch.randn(24, 96) * torch.logspace(-3, 1, 24).unsqueeze(1)
    stored = quantize_weight(weight, scheme, dtype, clip=0.9)
    assert stored.scale.dtype == dtype
    assert torch.equal(stored.dequantize(), round_trip(weight, scheme, dtype, clip=0.9))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_rounding_is_within_half_a_step(scheme):
    torch.manual_seed(2)
    weight = torch.randn(16, 96)
    scale = range_grid(weight, scheme, torch.float32).scale
    error = (round_trip(weight, scheme, torch.float32) - weight).abs().view(16, scale.shape[1], -1)
    # The zero point is rounded too, which costs up to half a step more at the ends of an asymmetric range.
    assert (error <= scale.unsqueeze(-1) * (1.0001 if not scheme.symmetric else 0.5001)).all()


def test_a_group_of_zeros_stays_zero_with_a_positive_scale():
    weight = torch.randn(4, 64)
    weight[1, 32:] = 0
    for scheme in SCHEMES[:2]:
        scale = quantize_weight(weight, scheme, torch.float16).scale
        assert (scale > 0).all()
        assert torch.isfinite(scale).all()
        assert (round_trip(weight, scheme, torch.float16)[1, 32:] == 0).all()


def test_tiny_weights_do_not_get_a_zero_scale_in_half_precision():
    stored = quantize_weight(torch.full((2, 32), 1e-9), G32, torch.float16)
    assert (stored.scale > 0).all()
    assert torch.isfinite(stored.dequantize()).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_a_searched_grid_is_no_worse_in_any_group_and_better_for_bell_shaped_weights(scheme):
    torch.manual_seed(3)
    weight, importance = torch.randn(40, 96), torch.rand(96).exp()

    def errors(grid: Grid) -> torch.Tensor:
        return (grid.grouped(grid.values(grid.nearest(weight)) - weight).square() * importance.view(1, -1, width)).sum(
            -1
        )

    plain = range_grid(weight, scheme, torch.bfloat16)
    width = plain.grouped(weight).shape[-1]
    searched = searched_grid(weight, scheme, torch.bfloat16, importance)
    assert (errors(searched) <= errors(plain)).all()
    assert errors(searched).sum() < errors(plain).sum() * (0.97 if scheme.bits < 8 else 1.0001)


def test_a_scale_that_cannot_be_stored_leaves_the_old_one():
    grid = range_grid(torch.randn(2, 64), G32, torch.float16)
    new = grid.with_scale(torch.tensor([[0.5, -1.0], [float("nan"), 1e6]]), torch.float16)
    assert new.scale[0, 0] == 0.5
    assert torch.equal(new.scale.flatten()[1:], grid.scale.flatten()[1:])


def test_saturated_share_counts_what_lies_outside():
    weight = torch.arange(32.0).unsqueeze(0)
    assert saturated_share(weight, range_grid(weight, G32, torch.float32, 0.5)) == pytest.approx(15 / 32)
    assert saturated_share(weight, range_grid(weight, G32, torch.float32)) == 0
