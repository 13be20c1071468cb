"""Several methods on one layer, and the better one kept."""

import pytest
import torch
from layer_bench import ALL, LayerBench

from llmq.quantize import awq_layer, best_layer, gptq_layer
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.layer_methods import round_layer
from llmq.quantize.layer_work import LayerOutcome

SCHEME = WeightScheme("int", 3, "group", 16, symmetric=False)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def added(bench, layer):
    return [bench.addition(layer, sample) for sample in bench.samples]


def energy(differences):
    return sum(float(one.square().sum()) for one in differences)


@pytest.mark.parametrize("order", [("rtn", "gptq"), ("gptq", "rtn"), ("awq", "gptq", "rtn")], ids="-".join)
def test_the_layer_is_left_as_the_best_method_makes_it(tiny_llama, order):
    methods = {"rtn": round_layer, "gptq": gptq_layer.quantize_layer, "awq": awq_layer.quantize_layer}
    bench = LayerBench(tiny_llama())
    errors = {}
    for name in order:
        with bench.stream.layer(bench.index) as layer:
            before = added(bench, layer)
            methods[name](bench.work(layer, scheme=SCHEME))
            errors[name] = energy(a - b for a, b in zip(added(bench, layer), before, strict=True))
    with bench.stream.layer(bench.index) as layer:
        outcome = best_layer.quantize_layer(bench.work(layer, scheme=SCHEME), {name: methods[name] for name in order})
        left = energy(a - b for a, b in zip(added(bench, layer), before, strict=True))
        assert left == pytest.approx(min(errors.values()), rel=1e-4)
        assert {linear.method for linear in outcome.linears.values()} == {min(errors, key=errors.get)}
        assert set(outcome.linears) == ALL
        for name, linear in outcome.linears.items():
            assert torch.equal(layer.get_submodule(name).weight, linear.weight.dequantize())


def test_each_method_begins_with_the_original(tiny_llama):
    bench, seen = LayerBench(tiny_llama()), []

    def spoiling(work):
        seen.append({name: parameter.clone() for name, parameter in work.layer.named_parameters()})
        for parameter in work.layer.parameters():
            parameter.mul_(3)
        return LayerOutcome()

    with bench.stream.layer(bench.index) as layer:
        best_layer.quantize_layer(bench.work(layer, scheme=SCHEME), {"a": spoiling, "b": spoiling})
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
