"""SmoothQuant's arithmetic, and SmoothQuant on a real decoder layer."""

import pytest
import torch
from layer_bench import ALL, GQA_9_3, LayerBench

from llmq.quantize import gptq_layer
from llmq.quantize.formats.scheme import ActivationScheme, WeightScheme
from llmq.quantize.layer_work import LayerOutcome
from llmq.quantize.rounding import round_trip
from llmq.quantize.smoothquant import round_tokens, search_smoothing, smoothing_scales
from llmq.quantize.smoothquant_layer import quantize_layer, smooth_layer
from llmq.runtime.layers.rounded_input import rounded

W8A8 = WeightScheme("int", 8, "channel", activation=ActivationScheme("int"), layout="int-quantized")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def outliers():
    torch.manual_seed(0)
    x = torch.randn(256, 128)
    x[:, [3, 40, 77]] *= 60
    return torch.randn(64, 128), x


def test_scales_are_those_of_equation_4():
    scales = smoothing_scales(torch.tensor([16.0, 1.0, 0.0]), torch.tensor([4.0, 1.0, 1.0]), 0.5)
    assert scales.tolist() == pytest.approx([2.0, 1.0, 1.0])


def test_tokens_are_rounded_as_the_runtime_rounds_them(outliers):
    _, x = outliers
    assert torch.equal(round_tokens(x), rounded(x, W8A8.activation, None))


def test_the_search_takes_the_alpha_of_least_error(outliers):
    weight, x = outliers
    found = search_smoothing([weight], x, x.abs().amax(0), W8A8, torch.bfloat16)

    def error(s):
        y = round_tokens(x / s) @ round_trip(weight * s, W8A8, torch.bfloat16).T
        return float((y - x @ weight.T).square().sum() / (x @ weight.T).square().sum())

    by_alpha = {a / 10: error(smoothing_scales(x.abs().amax(0), weight.abs().amax(0), a / 10)) for a in range(11)}
    assert found.error == pytest.approx(min(by_alpha.values()), rel=1e-4)
    assert by_alpha[found.alpha] == min(by_alpha.values())
    assert found.unscaled_error == pytest.approx(error(torch.ones(128)), rel=1e-4)
    assert found.error < found.unscaled_error / 3


def test_an_alpha_that_is_asked_for_is_used_though_it_is_worse(outliers):
    weight, x = outliers
    found = search_smoothing([weight], torch.ones_like(x), torch.ones(128), W8A8, torch.bfloat16, alphas=(0.0,))
    assert found.alpha == 0.0
    none = search_smoothing([weight], x, x.abs().amax(0), W8A8, torch.bfloat16, lambda s: None, alphas=(0.5,))
    assert none.alpha is None
    assert none.num_unusable == 1
    assert (none.scales == 1).all()


@pytest.mark.parametrize(
    "config",
    [{}, GQA_9_3, {"model_type": "qwen2"}, {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8}],
    ids=["llama", "9:3", "qwen2", "gemma2"],
)
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_smoothing_is_an_identity_before_rounding(tiny_llama, config, alpha):
    bench = LayerBench(tiny_llama(**config))
    with bench.stream.layer(bench.index) as layer:
        before = [bench.addition(layer, sample) for sample in bench.samples]
        changed, scalings = smooth_layer(bench.work(layer, scheme=W8A8), alpha)
        assert all(scaling.skipped is None for scaling in scalings)
        heads = layer.self_attn.o_proj.in_features // layer.self_attn.v_proj.out_features
        assert [scaling.num_sharing for scaling in scalings] == [1, heads, 1, 1]
        if alpha is not None:
            assert {scaling.alpha for scaling in scalings} == {alpha}
        assert any(scaling.alpha is not None for scaling in scalings)
        for sample, original in zip(bench.samples, before, strict=True):
            assert (bench.addition(layer, sample) - original).abs().max() < 1e-4 * original.abs().max()
        for name, stored in changed.items():
            assert torch.equal(layer.get_parameter(name), stored.to(torch.float32))


@pytest.mark.parametrize("config", [{}, GQA_9_3], ids=["llama", "9:3"])
def test_what_gptq_reads_after_smoothing_is_what_the_smoothed_layer_shows(tiny_llama, config, monkeypatch):
    bench, seen = LayerBench(tiny_llama(**config)), {}
    with bench.stream.layer(bench.index) as layer:
        work = bench.work(layer, scheme=W8A8)

        def compare(work, statistics):
            measured = work.measure_and_sample(1)  # tokens alike, as there
            assert statistics.keys() == measured.keys()
            for name, expected in measured.items():
                for attribute in ("gram", "mean_abs", "max_abs"):
                    own, other = getattr(statistics[name], attribute), getattr(expected, attribute)
                    assert (own - other).abs().max() < 1e-4 * other.abs().max()
                seen[name] = statistics[name].num_tokens == expected.num_tokens
            return LayerOutcome()

        monkeypatch.setattr(gptq_layer, "quantize_layer", compare)
        outcome = quantize_layer(work)
    assert any(scaling.alpha is not None for scaling in outcome.scalings)
    assert seen == dict.fromkeys(ALL, True)


def test_a_layer_in_int8_is_nearer_to_the_original_than_without_smoothing(tiny_llama):
    bench = LayerBench(tiny_llama())
    for sample in bench.samples:
        sample[..., 3] *= 40

    def error(smooth):
        with bench.stream.layer(bench.index) as layer:
            expected = [bench.addition(layer, sample) for sample in bench.samples]
            if smooth:
                outcome = quantize_layer(bench.work(layer, scheme=W8A8))
                assert set(outcome.linears) == ALL
                assert all(linear.weight.values.dtype == torch.int8 for linear in outcome.linears.values())
            for name in ALL:
                linear = layer.get_submodule(name)
                if not smooth:
                    linear.weight.copy_(round_trip(linear.weight, W8A8, torch.bfloat16))
                linear.register_forward_pre_hook(lambda _, args: (round_tokens(args[0][0]).unsqueeze(0),))
            made = [bench.addition(layer, sample) for sample in bench.samples]
            for name in ALL:
                layer.get_submodule(name)._forward_pre_hooks.clear()
        return sum(float((a - b).square().sum()) for a, b in zip(made, expected, strict=True))

    assert error(smooth=True) < 0.6 * error(smooth=False)


def test_what_is_left_alone_is_not_smoothed_and_the_reason_is_told(tiny_llama):
    bench = LayerBench(tiny_llama())
    with bench.stream.layer(bench.index) as layer:
        original = layer.self_attn.v_proj.weight.clone()
        outcome = quantize_layer(bench.work(layer, ALL - {"self_attn.v_proj"}, scheme=W8A8))
        assert torch.equal(layer.self_attn.v_proj.weight, original)
        reasons = {scaling.mapping.source: scaling.skipped for scaling in outcome.scalings}
        assert "self_attn.v_proj" in reasons["input_layernorm"]
        assert "self_attn.v_proj" in reasons["self_attn.v_proj"]
        assert reasons["mlp.up_proj"] is None
