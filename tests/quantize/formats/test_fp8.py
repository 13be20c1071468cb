"""Fine-grained FP8 and AutoFP8: read by their definitions, written, refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.quantize.formats.fp8 import FP8Format, FP8Writer, block_scheme
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import FormatError, WeightScheme


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_each_number_is_multiplied_by_its_blocks_scale(out, in_, seed):
    generator = torch.Generator().manual_seed(seed)
    scheme = block_scheme(16, 8)
    values = torch.randn(out, in_, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(scheme.scale_shape((out, in_)), generator=generator) + 0.5
    tensors = FP8Writer().tensors("a", QuantizedWeight(scheme, (out, in_), values, scale))
    expected = values.float() * torch.tensor([[scale[o // 16, i // 8] for i in range(in_)] for o in range(out)])
    checkpoint = FP8Format.from_config(FP8Writer().config({"a": scheme}, []), tensors.keys())
    made = checkpoint.read("a", tensors.__getitem__)
    assert torch.equal(made.dequantize(), expected)
    assert torch.equal(made.spread_blocks().dequantize(), expected)
    first = out // 2
    assert torch.equal(checkpoint.read("a", tensors.__getitem__, rows=(first, out)).dequantize(), expected[first:])
    columns = (0, in_ // 8 * 8 or in_)
    part = checkpoint.read("a", tensors.__getitem__, columns=columns)
    assert torch.equal(part.dequantize(), expected[:, : columns[1]])
    assert checkpoint.scheme_for("b") is None


def test_autofp8_has_a_scale_for_the_tensor():
    tensors = {
        "a.weight": torch.randn(8, 16).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.tensor(0.5),
        "a.input_scale": torch.tensor([0.25]),
    }
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    weight = FP8Format.from_config(config, tensors.keys()).read("a", tensors.__getitem__)
    assert torch.equal(weight.dequantize(), tensors["a.weight"].float() * 0.5)
    assert weight.input_scale.item() == 0.25
    assert weight.scheme.name == "fp8 per tensor, activations fp8 static per tensor"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fmt": "e5m2"}, "'e5m2'"),
        ({"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}, "'ue8m0'"),
        ({"activation_scheme": "static", "weight_block_size": [128, 128]}, "'static' with weight_block_size"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(FormatError, match=message):
        FP8Format.from_config({"quant_method": "fp8", **config}, ())


def test_scales_of_another_shape_are_refused():
    tensors = {"a.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 1)}
    checkpoint = FP8Format.from_config({"quant_method": "fp8", "weight_block_size": [16, 16]}, tensors.keys())
    with pytest.raises(FormatError, match=r"weight_scale_inv \[2, 1\]"):
        checkpoint.read("a", tensors.__getitem__)


def test_other_schemes_are_sent_elsewhere():
    with pytest.raises(FormatError, match="compressed-tensors"):
        FP8Writer().check(WeightScheme("float", 8, "channel", layout="float-quantized"))
