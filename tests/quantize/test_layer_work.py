"""What a method is told about a layer's inputs."""

import pytest
import torch
from layer_bench import LayerBench
from torch import nn

from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.layer_work import InputStatistics, LayerWork, SampledStatistics


class Block(nn.Module):
    """Two siblings of one input, a third linear behind them, and one that only some samples reach."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.rare = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 6)
        self.never = nn.Linear(6, 2)
        self.num_calls_of_c = 0

    def forward(self, x):
        h = self.a(x) * self.b(x)
        self.num_calls_of_c += 1
        y = self.c(h)
        return self.rare(y) if x.shape[1] == 5 else y


@pytest.fixture
def work():
    torch.manual_seed(0)
    block, samples = Block(), [torch.randn(1, length, 6) for length in (3, 5, 2)]
    schemes = {name: WeightScheme("int", 4, "channel") for name in ("a", "b", "c", "rare", "never")}
    return LayerWork(block, schemes, (), samples, block, block, torch.bfloat16, 1)


@torch.no_grad()
def test_statistics_are_those_of_all_tokens(work):
    x = torch.cat(work.samples, 1)[0]
    hidden = work.layer.a(x) * work.layer.b(x)
    statistics = work.measure()
    for name, inputs in (("a", x), ("c", hidden)):
        assert torch.allclose(statistics[name].gram, inputs.T @ inputs / 10, atol=1e-5)
        assert torch.allclose(statistics[name].mean_abs, inputs.abs().mean(0))
        assert torch.allclose(statistics[name].max_abs, inputs.abs().amax(0))
    assert {name: s.num_tokens for name, s in statistics.items()} == {"a": 10, "b": 10, "c": 10, "rare": 5, "never": 0}
    assert statistics["never"].gram.shape == (6, 6)


@torch.no_grad()
def test_siblings_share_their_statistics_and_count_no_token_twice(work):
    statistics = work.measure(["a", "b"])
    assert statistics["a"] is statistics["b"]
    assert statistics["a"].num_tokens == 10


@torch.no_grad()
def test_a_forward_ends_with_the_last_linear_that_is_measured(work):
    work.measure(["a", "b"])
    assert work.layer.num_calls_of_c == 0
    work.measure(["c"])
    assert work.layer.num_calls_of_c == 3
    assert not any(module._forward_pre_hooks for module in work.layer.modules())


@torch.no_grad()
def test_what_is_measured_follows_the_weights(work):
    before = work.measure(["c"])["c"].mean_abs
    work.layer.a.weight.mul_(2)
    work.layer.a.bias.mul_(2)
    assert torch.allclose(work.measure(["c"])["c"].mean_abs, 2 * before)


@pytest.mark.parametrize("in_features", [1, 7, 64, 1100, 1537])
def test_a_gram_matrix_is_whole_and_symmetric_at_any_width(in_features):
    x = torch.randn(9, in_features)
    statistics = InputStatistics(in_features)
    for part in x.split([4, 5]):
        statistics.add(part)
    assert torch.allclose(statistics.gram, x.T @ x / 9, atol=1e-5)
    assert torch.equal(statistics.gram, statistics.gram.T)


@pytest.mark.parametrize("length", [1, 2, 31, 200])
def test_the_first_token_of_a_sample_weighs_as_much_as_its_share(length):
    """And no less than another, where samples are short. What is said of all tokens alike counts each once."""
    x = torch.randn(3, length, 70)
    statistics = InputStatistics(70)
    for part in x.split([1, 2]):
        statistics.add(part)
    weights = torch.ones(length)
    weights[0] = max(1.0, (length - 1) / 31)
    expected = torch.einsum("t,bti,btj->ij", weights, x, x) / (3 * weights.sum())
    torch.testing.assert_close(statistics.gram, expected, rtol=1e-4, atol=1e-5)
    assert weights[0] / weights.sum() == pytest.approx(max(1 / length, 1 / 32))
    assert statistics.num_tokens == 3 * length
    torch.testing.assert_close(statistics.mean_abs, x.abs().mean((0, 1)), rtol=1e-4, atol=1e-5)


def test_where_tokens_are_rounded_by_themselves_all_weigh_alike():
    x = torch.randn(2, 200, 70)
    statistics = SampledStatistics(70)
    statistics.add(x)
    torch.testing.assert_close(statistics.gram, torch.einsum("nti,ntj->ij", x, x) / 400, rtol=1e-4, atol=1e-5)


def test_statistics_of_no_token_are_zero():
    statistics = InputStatistics(3)
    statistics.add(torch.zeros(0, 3))
    assert statistics.num_tokens == 0
    assert (statistics.gram == 0).all()
    assert statistics.num_dead == 3


def test_the_second_moment_of_a_wide_input_is_whole_and_symmetric():
    statistics, x = InputStatistics(1300), torch.randn(2, 50, 1300)
    for sample in x:
        statistics.add(sample)
        assert statistics.gram.shape == (1300, 1300)  # asked for in between, it goes on
    whole = x.flatten(0, 1)
    torch.testing.assert_close(statistics.gram, whole.T @ whole / 100, rtol=1e-4, atol=1e-4)
    assert torch.equal(statistics.gram, statistics.gram.T)


@torch.no_grad()
def test_statistics_are_made_once_for_each_input(tiny_llama, monkeypatch):
    """Each is as large as a square of the input: one too many would be the most that a run holds."""
    made, make = [], InputStatistics.__init__
    monkeypatch.setattr(InputStatistics, "__init__", lambda self, *args: made.append(args[0]) or make(self, *args))
    bench = LayerBench(tiny_llama())
    with bench.stream.layer(bench.index) as layer:
        statistics = bench.work(layer).measure()
    assert len(made) == len({id(one) for one in statistics.values()}) == 4
