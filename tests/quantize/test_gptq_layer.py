"""GPTQ on a real decoder layer."""

import pytest
import torch
from layer_bench import ALL, GQA_9_3, LayerBench

from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.gptq_layer import quantize_layer
from llmq.quantize.rounding import round_trip


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    "scheme",
    [
        WeightScheme("int", 3, "group", 16, symmetric=False),
        WeightScheme("int", 4, "group", 16),
        WeightScheme("int", 8, "channel", layout="int-quantized"),
    ],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("config", [{}, GQA_9_3, {"model_type": "qwen2"}], ids=["llama", "9:3", "qwen2"])
def test_the_layer_computes_with_what_is_stored_and_better_than_rounding(tiny_llama, config, scheme):
    bench = LayerBench(tiny_llama(**config))
    with bench.stream.layer(bench.index) as layer:
        outcome = quantize_layer(bench.work(layer, scheme=scheme))
        assert set(outcome.linears) == ALL
        assert not outcome.warnings
        for name, linear in outcome.linears.items():
            assert torch.equal(layer.get_submodule(name).weight, linear.weight.dequantize())
            assert linear.weight.scheme == scheme
            assert linear.num_tokens == 71
            assert linear.damping == 0.1
            assert linear.output_error < linear.rtn_output_error


def test_what_a_layer_adds_is_nearer_to_the_original_than_after_rounding(tiny_llama):
    bench = LayerBench(tiny_llama())
    scheme = WeightScheme("int", 3, "group", 16, symmetric=False)
    with bench.stream.layer(bench.index) as layer:
        original = {name: parameter.clone() for name, parameter in layer.named_parameters()}
        before = [bench.addition(layer, sample) for sample in bench.samples]

        def error():
            after = [bench.addition(layer, sample) for sample in bench.samples]
            return sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))

        quantize_layer(bench.work(layer, scheme=scheme))
        ours = error()
        for name in ALL:
            layer.get_submodule(name).weight.copy_(round_trip(original[f"{name}.weight"], scheme, torch.bfloat16))
        assert ours < 0.7 * error()


def test_the_layer_is_run_once_for_all_of_its_linears(tiny_llama):
    bench, passes = LayerBench(tiny_llama()), []
    with bench.stream.layer(bench.index) as layer:
        expected = bench.work(layer).measure(["mlp.down_proj"])["mlp.down_proj"]
        layer.input_layernorm.register_forward_pre_hook(lambda *_: passes.append(1))
        outcome = quantize_layer(bench.work(layer))
        assert len(passes) == len(bench.samples)
        assert outcome.linears["mlp.down_proj"].num_tokens == expected.num_tokens


def test_dead_inputs_are_counted_and_the_rest_is_as_if_their_weights_had_been_zero(tiny_llama):
    bench = LayerBench(tiny_llama())
    integers = []
    for clear in (False, True):
        with bench.stream.layer(bench.index) as layer:
            layer.input_layernorm.weight[5] = 0
            if clear:
                for name in "qkv":
                    layer.get_submodule(f"self_attn.{name}_proj").weight[:, 5] = 0
            outcome = quantize_layer(bench.work(layer))
            assert outcome.linears["self_attn.q_proj"].num_dead_inputs == 1
            assert outcome.linears["mlp.up_proj"].num_dead_inputs == 0
            assert all(torch.isfinite(linear.weight.dequantize()).all() for linear in outcome.linears.values())
            integers.append({name: linear.weight.integers() for name, linear in outcome.linears.items()})
    for name in ALL:
        assert torch.equal(integers[0][name], integers[1][name])


def test_three_tokens_are_enough_not_to_fail(tiny_llama):
    bench = LayerBench(tiny_llama())
    bench.samples = [bench.samples[0][:, :3]]
    with bench.stream.layer(bench.index) as layer:
        outcome = quantize_layer(bench.work(layer), damping=0.0)
        for linear in outcome.linears.values():
            assert linear.num_tokens == 3
            assert linear.damping > 0
            assert torch.isfinite(linear.weight.dequantize()).all()
        assert any("damping raised from 0" in warning for warning in outcome.warnings)


def test_a_linear_that_no_token_reaches_is_rounded_to_nearest_and_named(tiny_llama):
    bench = LayerBench(tiny_llama())
    with bench.stream.layer(bench.index) as layer:
        layer.spare = torch.nn.Linear(32, 8, bias=False)
        work = bench.work(layer, ["self_attn.o_proj", "spare"])
        outcome = quantize_layer(work)
        assert outcome.linears["spare"].num_tokens == 0
        assert outcome.linears["spare"].output_error is None
        assert [warning for warning in outcome.warnings if "spare" in warning and "no calibration token" in warning]
