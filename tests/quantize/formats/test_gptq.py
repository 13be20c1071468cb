"""GPTQ's layout: what AutoGPTQ wrote, by the paper's definition; what we write; and what is refused."""

from dataclasses import replace

import pytest
import torch
from foreign_layouts import folder_tensors, gptq_weight, linears_of, quantization_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.quantize.formats.gptq import GPTQFormat, GPTQWriter, to_tensors
from llmq.quantize.formats.packing import pack_int32
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.registry import format_of
from llmq.quantize.formats.scheme import FormatError, WeightScheme

FOLDERS = {"autogptq-w4g128-sym": "int4 g128 symmetric", "autogptq-w4g128-asym-actorder": "int4 g128 asymmetric"}


@pytest.mark.parametrize("name", FOLDERS)
def test_what_autogptq_wrote_is_read_and_written_back(shared, name):
    folder = shared / "interop" / name
    tensors = folder_tensors(folder)
    checkpoint = format_of(quantization_of(folder), tensors.keys())
    linears = linears_of(tensors, ".qweight")
    assert len(linears) == 21
    reordered = 0
    for linear in linears:
        weight = checkpoint.read(linear, tensors.__getitem__)
        assert weight.scheme.name.startswith(FOLDERS[name])
        reordered += weight.column_order is not None
        expected = torch.from_numpy(gptq_weight(tensors, linear, 4, zero_offset=1)).float()
        assert torch.equal(weight.dequantize(), expected)
        written = to_tensors(linear, weight, zero_offset=1)
        for tensor_name, tensor in written.items():
            assert tensor.dtype == tensors[tensor_name].dtype
            assert torch.equal(tensor, tensors[tensor_name]), tensor_name
    assert reordered == (21 if "actorder" in name else 0)
    assert checkpoint.scheme_for("lm_head") is None


def test_a_bias_of_zeros_may_be_left_and_another_not(shared):
    folder = shared / "interop" / "autogptq-w4g128-sym"
    tensors = folder_tensors(folder)
    checkpoint = format_of(quantization_of(folder), tensors.keys())
    bias = "model.layers.0.mlp.down_proj.bias"
    assert checkpoint.may_ignore(bias, tensors.__getitem__)
    tensors[bias][3] = 0.5
    assert not checkpoint.may_ignore(bias, tensors.__getitem__)
    assert not checkpoint.may_ignore("model.norm.bias", {"model.norm.bias": torch.zeros(4)}.__getitem__)


@st.composite
def weights(draw):
    bits = draw(st.sampled_from([2, 3, 4, 8]))
    groups, symmetric = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    out, in_ = 32 * draw(st.integers(1, 2)), 64
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    half = 1 << (bits - 1)
    q = torch.randint(-half, half, (out, in_), generator=generator, dtype=torch.int8)
    zero = torch.randint(-half, half, (out, groups), generator=generator, dtype=torch.int8)
    order = torch.randperm(in_, generator=generator) if groups > 1 and draw(st.booleans()) else None
    if order is not None:  # the columns of a group keep their order, as readers sort them
        order = order.view(groups, -1).sort(dim=1).values.flatten()
    strategy, group_size = ("channel", None) if groups == 1 else ("group", in_ // groups)
    return QuantizedWeight(
        WeightScheme("int", bits, strategy, group_size, symmetric, has_column_groups=order is not None),
        (out, in_),
        pack_int32(q, bits),
        torch.rand(out, groups, generator=generator) + 0.1,
        None if symmetric else zero,
        column_order=order,
    )


@settings(max_examples=60, deadline=None)
@given(weights(), st.sampled_from(["gptq", "gptq_v2"]))
def test_round_trip(weight, layout):
    offset = {"gptq": 1, "gptq_v2": 0}[layout]
    lowest = -(1 << (weight.scheme.bits - 1))
    if offset and weight.zero_point is not None:
        weight = replace(weight, zero_point=weight.zero_point.clamp(min=lowest + 1))
    tensors = to_tensors("a", weight, offset)
    expected = torch.from_numpy(gptq_weight(tensors, "a", weight.scheme.bits, offset)).float()
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=0)
    scheme = weight.scheme
    config = {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group_size or -1,
        "sym": scheme.symmetric,
        "desc_act": scheme.has_column_groups,
        "checkpoint_format": layout,
    }
    made = GPTQFormat.from_config(config, tensors.keys()).read("a", tensors.__getitem__)
    assert made.scheme == scheme
    for field in ("values", "scale", "zero_point", "column_order"):
        one, other = getattr(made, field), getattr(weight, field)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@settings(max_examples=30, deadline=None)
@given(weights(), st.integers(0, 31))
def test_a_rank_reads_its_rows(weight, start):
    tensors = to_tensors("a", weight, 0)
    config = GPTQWriter("gptq_v2").config({"a": weight.scheme}, [])
    part = GPTQFormat.from_config(config, tensors.keys()).read("a", tensors.__getitem__, rows=(start, 32))
    assert torch.equal(part.dequantize(), weight.dequantize()[start:32])


def test_three_bits_lie_as_autogptq_packs_them():
    """32 numbers in 3 words: 10 and two bits of the 11th, one bit, 10 and a bit of the 22nd, two bits, 10."""
    u = torch.randint(0, 8, (32, 32), generator=torch.Generator().manual_seed(0))
    scheme = WeightScheme("int", 3, "channel")
    weight = QuantizedWeight(scheme, (32, 32), pack_int32((u - 4).to(torch.int8), 3), torch.ones(32, 1))
    words = to_tensors("a", weight, 0)["a.qweight"].to(torch.int64) & 0xFFFFFFFF
    column = u[5].tolist()
    first = sum(n << 3 * i for i, n in enumerate(column[:10])) | (column[10] & 3) << 30
    second = column[10] >> 2 | sum(n << 3 * i + 1 for i, n in enumerate(column[11:21])) | (column[21] & 1) << 31
    third = column[21] >> 1 | sum(n << 3 * i + 2 for i, n in enumerate(column[22:]))
    assert words[:, 5].tolist() == [first, second, third]


def test_the_other_convention_is_noticed_where_it_shows():
    weight = QuantizedWeight(
        WeightScheme("int", 4, "group", 32),
        (32, 32),
        pack_int32(torch.zeros(32, 32, dtype=torch.int8), 4),
        torch.ones(32, 1),
    )
    tensors = GPTQWriter("gptq_v2").tensors("a", weight)
    config = GPTQWriter("gptq").config({"a": weight.scheme}, [])
    with pytest.raises(FormatError, match="gptq_v2"):
        GPTQFormat.from_config(config, tensors.keys()).read("a", tensors.__getitem__)


def test_config_says_what_differs_and_what_is_left():
    usual, other = WeightScheme("int", 4, "group", 128), WeightScheme("int", 8, "group", 32)
    config = GPTQWriter("gptq").config({"l.0.a": usual, "l.1.a": usual, "l.0.b": other}, ["l.1.b", "lm_head"])
    read = GPTQFormat.from_config(config, {"l.0.a.qweight", "l.0.b.qweight"})
    assert read.scheme_for("l.0.a") == usual
    assert read.scheme_for("l.0.b") == other
    assert read.scheme_for("l.1.b") is None
    contradiction = GPTQFormat.from_config(config, {"l.1.b.qweight"})
    with pytest.raises(FormatError, match=r"l\.1\.b"):
        contradiction.scheme_for("l.1.b")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 5}, "5-bit"),
        ({"bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"bits": 4, "is_marlin_format": True}, "'marlin'"),
        ({"bits": 4, "checkpoint_format": "bitblas"}, "'bitblas'"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(FormatError, match=message):
        GPTQFormat.from_config({"quant_method": "gptq", **config}, ())


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (WeightScheme("int", 5, "group", 32), None, "2, 3, 4, 8 bits"),
        (WeightScheme("float", 8, "channel", layout="float-quantized"), None, "fp8"),
        (WeightScheme("int", 4, "group", 32, symmetric=False), None, "gptq_v2"),
        (WeightScheme("int", 4, "group", 48), (64, 64), "group"),
        (WeightScheme("int", 3, "channel"), (64, 48), "multiples of 32"),
    ],
)
def test_what_cannot_be_written_is_refused(scheme, shape, message):
    with pytest.raises(FormatError, match=message):
        GPTQWriter("gptq").check(scheme, shape)


def test_a_zero_point_of_zero_is_not_written_as_minus_one():
    scheme = WeightScheme("int", 4, "channel", symmetric=False)
    weight = QuantizedWeight(
        scheme,
        (32, 32),
        pack_int32(torch.zeros(32, 32, dtype=torch.int8), 4),
        torch.ones(32, 1),
        torch.full((32, 1), -8, dtype=torch.int8),
    )
    with pytest.raises(FormatError, match="zero point of 0"):
        to_tensors("a", weight, 1)
    assert to_tensors("a", weight, 0)["a.qzeros"].eq(0).all()
