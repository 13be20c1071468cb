"""AWQ on a real decoder layer: folding is an identity, whatever the heads, the biases and the dtype are."""

import pytest
import torch
from layer_bench import ALL, G16, GQA_9_3, LayerBench

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import FailedError
from llmq.quantize.awq import ALPHAS, candidate_scales, relative_weight_size
from llmq.quantize.awq_layer import AwqLayer, quantize_layer
from llmq.quantize.layer_stream import LayerStream
from llmq.quantize.mappings import ScaleMapping, why_skipped
from llmq.quantize.rounding import round_trip


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def measured(work):
    awq = AwqLayer(work)
    awq.moments = work.measure()
    return awq


@pytest.mark.parametrize(
    "config",
    [
        {},
        GQA_9_3,
        {"num_key_value_heads": 4},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "mistral", "sliding_window": 8},
    ],
    ids=lambda c: "-".join(map(str, c.values())) or "llama",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folding_is_an_identity_in_float32(tiny_llama, config, dtype):
    bench = LayerBench(tiny_llama(**config))
    with bench.stream.layer(bench.index) as layer:
        for module in layer.modules():  # norms and biases that are not all one or zero
            if getattr(module, "bias", None) is not None:
                module.bias.normal_()
        layer.input_layernorm.weight.uniform_(0.2, 3)
        before = [bench.addition(layer, sample) for sample in bench.samples]
        awq, changed = measured(bench.work(layer, dtype=dtype)), {}
        scalings = [awq._scale(mapping, changed) for mapping in bench.mappings]
        assert all(scaling.alpha is not None for scaling in scalings)
        for sample, original in zip(bench.samples, before, strict=True):
            moved = (bench.addition(layer, sample) - original).abs().max() / original.abs().max()
            assert moved < 1e-4
        # What is stored in 16 bit is what the layer computed with: nothing is rounded afterwards.
        for name, stored in changed.items():
            assert stored.dtype == dtype
            assert torch.equal(layer.get_parameter(name), stored.to(torch.float32))


def test_scales_are_equal_for_query_heads_that_share_a_kv_head(tiny_llama):
    bench = LayerBench(tiny_llama(**GQA_9_3))
    with bench.stream.layer(bench.index) as layer:
        wanted = torch.rand(144) + 0.5
        scales = measured(bench.work(layer)).folding.realize(bench.mappings[1], wanted).view(3, 3, 16)
        assert bench.mappings[1].kind == "heads"
        for query in range(3):
            assert torch.allclose(scales[:, query], wanted.view(3, 3, 16).log().mean(1).exp())


def test_the_layer_computes_with_what_is_stored_and_better_than_rounding(tiny_llama):
    bench = LayerBench(tiny_llama())
    with bench.stream.layer(bench.index) as layer:
        outcome = quantize_layer(bench.work(layer))
        assert set(outcome.linears) == ALL
        for name, linear in outcome.linears.items():
            assert torch.equal(layer.get_submodule(name).weight, linear.weight.dequantize())
            assert linear.num_tokens == 71
            assert linear.output_error <= linear.rtn_output_error * 1.05
        ours = sum(linear.output_error for linear in outcome.linears.values())
        assert ours < 0.8 * sum(linear.rtn_output_error for linear in outcome.linears.values())


def test_scales_of_norms_are_those_of_least_error_in_what_the_layer_adds(tiny_llama):
    bench = LayerBench(tiny_llama())
    mapping = bench.mappings[0]
    with bench.stream.layer(bench.index) as layer:
        awq = measured(bench.work(layer))
        weights = {name: layer.get_submodule(name).weight.clone() for name in mapping.linears}
        expected = [bench.addition(layer, sample) for sample in bench.samples]
        energy = sum(float(y.square().sum()) for y in expected)

        def error(s):
            for name, weight in weights.items():
                layer.get_submodule(name).weight.copy_(round_trip(weight * s, G16, torch.bfloat16) / s)
            made = [bench.addition(layer, sample) for sample in bench.samples]
            for name, weight in weights.items():
                layer.get_submodule(name).weight.copy_(weight)
            return sum(float((a - b).square().sum()) for a, b in zip(made, expected, strict=True)) / energy

        moments = awq.moments[mapping.linears[0]]
        size = relative_weight_size(list(weights.values()), G16)
        candidates = [candidate_scales(moments.mean_abs, size, alpha) for alpha in ALPHAS]
        realized = [awq.folding.realize(mapping, s) for s in candidates]
        coarse = [error(s) for s in realized]
        scaling = awq._scale(mapping, {})
        assert scaling.error <= min(coarse) * (1 + 1e-4)
        assert scaling.unscaled_error > scaling.error
        assert all(not (layer.get_submodule(name).weight == weight).all() for name, weight in weights.items())


def test_linears_left_alone_keep_their_bytes_and_stop_the_mappings_they_are_in(tiny_llama):
    bench = LayerBench(tiny_llama())
    with bench.stream.layer(bench.index) as layer:
        original = {name: layer.get_submodule(name).weight.clone() for name in ("self_attn.v_proj", "mlp.down_proj")}
        quantized = ALL - set(original)
        outcome = quantize_layer(bench.work(layer, quantized))
        assert set(outcome.linears) == quantized
        for name, weight in original.items():
            assert torch.equal(layer.get_submodule(name).weight, weight)
        reasons = {scaling.mapping.source: scaling.skipped for scaling in outcome.scalings}
        assert "self_attn.v_proj" in reasons["input_layernorm"]
        assert "self_attn.v_proj" in reasons["self_attn.v_proj"]
        assert reasons["post_attention_layernorm"] is None
        assert "mlp.down_proj" in reasons["mlp.up_proj"]
        assert set(outcome.changed) == {"post_attention_layernorm.weight"}


def test_a_wrong_table_of_mappings_is_found_out(tiny_llama):
    bench = LayerBench(tiny_llama())
    bench.mappings = (ScaleMapping("post_attention_layernorm", ("self_attn.q_proj", "self_attn.k_proj"), "norm"),)
    with bench.stream.layer(bench.index) as layer, pytest.raises(FailedError, match="mappings is wrong"):
        quantize_layer(bench.work(layer))


def test_dead_input_channels_are_counted_and_harm_nobody(tiny_llama):
    bench = LayerBench(tiny_llama())
    with bench.stream.layer(bench.index) as layer:
        layer.input_layernorm.weight[5] = 0
        outcome = quantize_layer(bench.work(layer))
        assert outcome.linears["self_attn.q_proj"].num_dead_inputs == 1
        assert outcome.linears["mlp.up_proj"].num_dead_inputs == 0
        assert all(torch.isfinite(linear.weight.scale).all() for linear in outcome.linears.values())


def test_why_skipped_names_the_linears():
    mapping = ScaleMapping("mlp.up_proj", ("mlp.down_proj",), "rows")
    assert why_skipped(mapping, ALL) is None
    assert why_skipped(mapping, ALL - {"mlp.up_proj"}) == "mlp.up_proj is left in 16 bit"
    assert why_skipped(mapping, set()) == "mlp.down_proj, mlp.up_proj are left in 16 bit"


@pytest.mark.parametrize("config", [{}, {"model_type": "qwen2"}, {"model_type": "mistral", "sliding_window": 8}])
def test_the_layers_in_a_stream_compute_what_the_model_does(tiny_llama, config):
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(**config)
    stream = LayerStream(read_checkpoint(folder), torch.device("cpu"))
    ids = tuple(range(3, 40))
    (hidden,) = stream.embed((ids,))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for index in range(stream.num_layers):
        assert torch.allclose(hidden, expected[index], atol=1e-5)
        with stream.layer(index) as layer:
            hidden = stream.run(index, layer, hidden)
    assert torch.allclose(model.model.norm(hidden), expected[-1], atol=1e-4)
    assert all(parameter.is_meta for parameter in stream._layers[0].parameters())
