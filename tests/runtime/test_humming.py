"""humming behind its probe: what it is given (of a stand-in with its signatures), and when it is not asked and why."""

import types

import fake_humming
import pytest
import torch
from random_weights import make

pytest.importorskip("triton", reason="no triton here: pip install -e '.[triton]'")

from llmq.runtime.layers.humming_linear import HummingLinear, humming_tensors, use_humming
from llmq.runtime.layers.mlp import ACTIVATIONS, MLP
from llmq.runtime.layers.triton_linear import TritonWeightOnlyLinear

KINDS = {
    "symmetric": ("int", 4, "group", {"group_size": 32}),
    "zero points": ("int", 4, "group", {"group_size": 64, "zero": "int"}),
    "a scale a row": ("int", 4, "channel", {}),
}


def quantized(kind, out=128, columns=192, seed=0, dtype=torch.float16):
    number, bits, strategy, more = KINDS[kind]
    weight = make(number, bits, strategy, out, columns, seed, **more)
    object.__setattr__(weight, "scale", weight.scale.to(dtype))
    return weight


def mlp_of(kind, bias=False, **more):
    """A part of a decoder, and what it computes by its definition."""
    wide, out = quantized(kind, 128, 192, 0, **more), quantized(kind, 192, 128, 1, **more)
    biases = [torch.randn(128).half(), torch.randn(192).half()] if bias else [None, None]
    linears = [TritonWeightOnlyLinear(weight, one) for weight, one in zip((wide, out), biases, strict=True)]
    return MLP(*linears, ACTIVATIONS["silu"], gated=False), (wide, out), biases


def decoder_of(*parts):
    return types.SimpleNamespace(blocks=[types.SimpleNamespace(part=part) for part in parts])


def use(*parts, capability=(9, 0), module=fake_humming, dtype=torch.float16):
    def import_module(name):
        assert name == "humming.layer"
        if isinstance(module, Exception):
            raise module
        return module

    return use_humming(decoder_of(*parts), dtype, capability=capability, import_module=import_module)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_linears_are_replaced_and_compute_what_the_checkpoint_means(installed, kind, bias):
    installed("0.1.19")
    mlp, weights, biases = mlp_of(kind, bias)
    assert use(mlp) == "int4 weights by humming-kernels 0.1.19"
    assert [type(linear) for linear in mlp.linears] == [HummingLinear, HummingLinear]
    assert mlp.linears == [mlp.wide, mlp.out]
    for linear, weight, one in zip(mlp.linears, weights, biases, strict=True):
        x = torch.randn(4, weight.in_features).half()
        exact = x.float() @ weight.dequantize().t() + (0 if one is None else one.float())
        assert float((linear(x).float() - exact).norm() / exact.norm()) < 1e-3


def test_columns_in_activation_order_are_followed(installed):
    installed("0.1.20")
    mlp, (weight, _), _ = mlp_of("symmetric")
    order = torch.randperm(weight.in_features)
    mlp.wide.column_order = order
    use(mlp)
    x = torch.randn(2, weight.in_features).half()
    exact = x[:, order].float() @ weight.dequantize().t()
    torch.testing.assert_close(mlp.wide(x).float(), exact, rtol=2e-3, atol=1e-2)


class WrongLayer(fake_humming.HummingLayer):
    def forward(self, inputs):
        return 1.1 * super().forward(inputs)


@pytest.mark.parametrize(
    ("version", "case", "why"),
    [
        (None, {}, "humming-kernels is not installed"),
        ("0.1.4", {}, "humming-kernels 0.1.4 is installed, and llmq calls >=0.1.19,<0.2"),
        ("0.1.19", {"capability": (7, 5)}, "this GPU is older than Ampere"),
        ("0.1.19", {"module": ImportError("no nvcc\nat all")}, "fails here: no nvcc"),
        ("0.1.19", {"module": types.SimpleNamespace(HummingLayer=WrongLayer)}, "is 10.0% from the weight's"),
        ("0.1.19", {"dtype": torch.bfloat16}, "no linear here is in int4 as it takes them"),  # scales of fp16
    ],
)
def test_why_it_is_not_picked_is_said_and_all_is_left_as_it_was(installed, version, case, why):
    installed(version)
    mlp, _, _ = mlp_of("symmetric")
    before = list(mlp.linears)
    said = use(mlp, **case)
    assert said.startswith("no humming: ")
    assert why in said
    assert "\n" not in said
    assert mlp.linears == before == [mlp.wide, mlp.out]


def test_what_its_tiles_do_not_divide_is_left_to_our_own():
    assert humming_tensors(TritonWeightOnlyLinear(quantized("symmetric", 96), None), torch.float16) is None
    assert humming_tensors(TritonWeightOnlyLinear(quantized("symmetric", 128, 96), None), torch.float16) is None
