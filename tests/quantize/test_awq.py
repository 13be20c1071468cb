"""AWQ's arithmetic, as pure functions of tensors."""

import pytest
import torch

from llmq.quantize.awq import candidate_scales, output_error, search_clip, search_scales
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.layer_work import InputStatistics
from llmq.quantize.rounding import quantize_weight, round_trip

G32 = WeightScheme("int", 4, "group", 32, symmetric=False)
SCHEMES = [
    G32,
    WeightScheme("int", 4, "group", 16, symmetric=True),
    WeightScheme("int", 4, "channel", symmetric=False),
    WeightScheme("int", 8, "channel", layout="int-quantized"),
]


def moments_of(x):
    moments = InputStatistics(x.shape[-1])
    moments.add(x)
    return moments


@pytest.fixture
def outliers():
    """A linear whose input has a few channels 30 times the others: the case AWQ is for."""
    torch.manual_seed(0)
    x = torch.randn(512, 128)
    x[:, [3, 40, 77, 120]] *= 30
    return torch.randn(64, 128), x


def test_output_error_equals_the_sum_over_tokens(outliers):
    weight, x = outliers
    delta = round_trip(weight, G32, torch.float32) - weight
    direct = ((x @ delta.T) ** 2).sum(-1).mean().item()
    assert output_error(delta, moments_of(x).gram) == pytest.approx(direct, rel=1e-4)


def test_moments_do_not_depend_on_how_the_tokens_are_cut(outliers):
    _, x = outliers
    parts = InputStatistics(128)
    for piece in x.split([1, 200, 311]):
        parts.add(piece)
    assert torch.allclose(parts.gram, moments_of(x).gram, rtol=1e-4, atol=1e-4)
    assert parts.num_tokens == 512


def test_scales_cut_the_error_where_channels_stand_out(outliers):
    weight, x = outliers
    choice = search_scales([weight], moments_of(x), G32, torch.bfloat16)
    assert choice.alpha > 0
    assert choice.error < choice.unscaled_error / 2
    # The error reported is that of the output itself.
    scaled = round_trip(weight * choice.scales, G32, torch.bfloat16) / choice.scales
    direct = ((x @ (scaled - weight).T) ** 2).sum() / ((x @ weight.T) ** 2).sum()
    assert choice.error == pytest.approx(direct.item(), rel=1e-3)


def test_no_choice_is_worse_than_none():
    torch.manual_seed(3)
    weight, x = torch.randn(32, 64), torch.randn(128, 64)
    choice = search_scales([weight], moments_of(x), G32, torch.bfloat16)
    assert choice.error <= choice.unscaled_error


def test_when_no_candidate_can_be_stored_the_scales_stay_at_one(outliers):
    weight, x = outliers
    choice = search_scales([weight], moments_of(x), G32, torch.bfloat16, realize=lambda s: None)
    assert (choice.scales == 1).all()
    assert choice.error == choice.unscaled_error
    assert choice.num_unusable > 0


def test_a_column_of_60000_in_half_precision_ends_in_finite_positive_scales():
    torch.manual_seed(4)
    weight, x = torch.randn(32, 64), torch.randn(64, 64)
    weight[:, 5] *= 6e4
    weight[7, :32] = 0
    choice = search_scales([weight], moments_of(x), G32, torch.float16)
    stored = quantize_weight(weight * choice.scales, G32, torch.float16)
    assert torch.isfinite(choice.scales).all()
    assert (choice.scales > 0).all()
    assert torch.isfinite(stored.scale).all()
    assert (stored.scale > 0).all()


def test_a_dead_channel_keeps_scale_one_and_all_dead_changes_nothing():
    mean_abs = torch.tensor([0.0, 1.0, 4.0])
    scales = candidate_scales(mean_abs, torch.ones(3), 0.5)
    assert scales[0] == 1
    assert scales[2] / scales[1] == pytest.approx(2)
    assert (candidate_scales(torch.zeros(3), torch.ones(3), 0.5) == 1).all()


def test_clip_never_raises_a_groups_error_and_helps_with_a_far_weight():
    torch.manual_seed(5)
    weight, x = torch.randn(16, 64), torch.randn(256, 64)
    weight[3, 10] = 12.0
    x[:, 10] *= 0.01  # far out, and hardly used
    gram = moments_of(x).gram
    clip = search_clip(weight, gram, G32, torch.float32)
    plain = round_trip(weight, G32, torch.float32) - weight
    clipped = round_trip(weight, G32, torch.float32, clip) - weight
    for group, block in ((slice(0, 32), gram[:32, :32]), (slice(32, 64), gram[32:, 32:])):
        for row in range(16):
            a, b = plain[row, group], clipped[row, group]
            assert b @ block @ b <= (a @ block @ a) * (1 + 1e-4)
    assert clip[3, 0] < 1
    assert output_error(clipped, gram) < output_error(plain, gram)
