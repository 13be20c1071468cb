"""FP8 weights: what is stored, how near it is, and what fuses them."""

import pytest
import torch
from layer_bench import ALL, LayerBench

from llmq.quantize.formats.scheme import ActivationScheme, WeightScheme
from llmq.quantize.fp8 import _rounding_error, quantize_fp8, search_scale, static_input_scale, to_e4m3
from llmq.quantize.fp8_layer import quantize_layer

DYNAMIC = ActivationScheme("float")
CHANNEL = WeightScheme("float", 8, "channel", activation=DYNAMIC, layout="float-quantized")
TENSOR = WeightScheme(
    "float", 8, "tensor", activation=ActivationScheme("float", dynamic=False), layout="float-quantized"
)
BLOCK = WeightScheme(
    "float", 8, "block", 16, block_rows=8, activation=ActivationScheme("float", group_size=16), layout="float-quantized"
)
SCHEMES = [CHANNEL, TENSOR, BLOCK]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def naive(weight, scheme, scale):
    """Number by number, each with the scale of its own cell."""
    out = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            place = {"tensor": (0, 0), "channel": (row, 0), "block": (row // 8, column // 16)}[scheme.strategy]
            s = scale[place]
            out[row, column] = (weight[row, column] / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s
    return out


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(24, 48), (20, 40)], ids=["whole", "ragged"])
def test_what_is_stored_is_each_number_under_the_scale_of_its_cell(scheme, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-2, 1, shape[0]).unsqueeze(1)
    stored = quantize_fp8(weight, scheme, torch.bfloat16)
    assert stored.values.dtype == torch.float8_e4m3fn
    assert stored.scale.dtype == torch.bfloat16
    assert tuple(stored.scale.shape) == scheme.scale_shape(shape)
    assert torch.equal(stored.dequantize(), naive(weight, scheme, stored.scale.float()))


def test_the_error_that_is_searched_by_is_that_of_the_cast():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[torch.isfinite(numbers)].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, ties, ties * (1 + 1e-6), ties * (1 - 1e-6), torch.linspace(-448, 448, 9999)])
    made, expected = _rounding_error(x, torch.empty_like(x)), to_e4m3(x).float() - x
    is_normal = x.abs() >= 2.0**-6
    assert torch.equal(made[is_normal].abs(), expected[is_normal].abs())
    assert (made[~is_normal].abs() <= 2.0**-10).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_searched_scales_are_never_worse_than_the_largest_weight_at_448(scheme):
    torch.manual_seed(1)
    weight = torch.randn(64, 64)
    cells = {"tensor": (64, 64), "channel": (1, 64), "block": (8, 16)}[scheme.strategy]
    largest = weight.abs().unflatten(0, (-1, cells[0])).unflatten(2, (-1, cells[1])).amax((1, 3))
    plain = quantize_fp8(weight, scheme, torch.float32, largest / 448)
    ours = quantize_fp8(weight, scheme, torch.float32)
    errors = [
        (w.dequantize() - weight).square().unflatten(0, (-1, cells[0])).unflatten(2, (-1, cells[1])).sum((1, 3))
        for w in (ours, plain)
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
    assert errors[0].sum() < 0.97 * errors[1].sum()


def test_zeros_stay_zeros_and_no_number_becomes_nan():
    weight = torch.randn(4, 32)
    weight[1] = 0
    weight[2, 3] = 3e38
    weight[3] *= 1e-30
    for scheme in (CHANNEL, TENSOR):
        stored = quantize_fp8(weight, scheme, torch.bfloat16)
        assert torch.isfinite(stored.dequantize()).all()
        assert (stored.scale > 0).all()
        assert (stored.dequantize()[1] == 0).all()
    assert search_scale(torch.zeros(2, 4), CHANNEL, torch.float16).tolist() == [[1.0], [1.0]]
    assert float(static_input_scale(0.0, torch.bfloat16)) == 1.0


def test_without_static_activations_no_sample_is_run(tiny_llama):
    bench = LayerBench(tiny_llama())
    with bench.stream.layer(bench.index) as layer:
        bench.samples = ()
        outcome = quantize_layer(bench.work(layer, scheme=CHANNEL))
        for name, linear in outcome.linears.items():
            assert torch.equal(layer.get_submodule(name).weight, linear.weight.dequantize())
            assert linear.weight.input_scale is None
            assert 0 < linear.weight_error < 1e-3


def test_static_scales_reach_the_largest_input_and_siblings_share_theirs(tiny_llama):
    bench = LayerBench(tiny_llama())
    with bench.stream.layer(bench.index) as layer:
        largest = bench.work(layer).measure(["self_attn.q_proj", "mlp.down_proj"])
        outcome = quantize_layer(bench.work(layer, scheme=TENSOR))
        assert set(outcome.linears) == ALL
        for name, inputs in largest.items():
            linear = outcome.linears[name]
            expected = (inputs.max_abs.max() / 448).bfloat16().float()
            assert torch.equal(linear.weight.input_scale, expected)
            assert linear.num_tokens == 71
            assert linear.output_error < 5e-3
        for siblings in (
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
        ):
            weights = [outcome.linears[name].weight for name in siblings]
            assert len({(float(w.scale), float(w.input_scale)) for w in weights}) == 1
