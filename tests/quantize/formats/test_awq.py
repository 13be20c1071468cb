"""AWQ's GEMM layout: what AutoAWQ wrote, by its definition; what we write; and what is refused."""

import pytest
import torch
from foreign_layouts import awq_weight, folder_tensors, linears_of, quantization_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.quantize.formats.awq import AWQFormat, AWQWriter
from llmq.quantize.formats.packing import pack_int32
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.registry import format_of
from llmq.quantize.formats.scheme import FormatError, WeightScheme


def test_what_autoawq_wrote_is_read_and_written_back(shared):
    folder = shared / "interop" / "autoawq-w4g128-gemm"
    tensors = folder_tensors(folder)
    checkpoint = format_of(quantization_of(folder), tensors.keys())
    linears = linears_of(tensors, ".qweight")
    assert len(linears) == 21
    for linear in linears:
        weight = checkpoint.read(linear, tensors.__getitem__)
        assert weight.scheme == WeightScheme("int", 4, "group", 128, symmetric=False)
        assert torch.equal(weight.dequantize(), torch.from_numpy(awq_weight(tensors, linear)).float())
        for name, tensor in AWQWriter().tensors(linear, weight).items():
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name]), name
    assert checkpoint.scheme_for("lm_head") is None


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([16, 32, None]), st.integers(0, 2**31), st.integers(0, 30))
def test_round_trip_whole_and_by_rows(group_size, seed, start):
    generator = torch.Generator().manual_seed(seed)
    scheme = WeightScheme("int", 4, "group" if group_size else "channel", group_size, symmetric=False)
    groups = scheme.num_groups(64)
    weight = QuantizedWeight(
        scheme,
        (32, 64),
        pack_int32(torch.randint(-8, 8, (32, 64), generator=generator, dtype=torch.int8), 4),
        torch.rand(32, groups, generator=generator).half() + 0.1,
        torch.randint(-8, 8, (32, groups), generator=generator, dtype=torch.int8),
    )
    tensors = AWQWriter().tensors("a", weight)
    torch.testing.assert_close(
        weight.dequantize(), torch.from_numpy(awq_weight(tensors, "a")).float(), rtol=1e-6, atol=0
    )
    checkpoint = AWQFormat.from_config(AWQWriter().config({"a": scheme}, []), tensors.keys())
    made = checkpoint.read("a", tensors.__getitem__)
    assert made.scheme == scheme
    for field in ("values", "scale", "zero_point"):
        assert torch.equal(getattr(made, field), getattr(weight, field))
    part = checkpoint.read("a", tensors.__getitem__, rows=(start, 31))
    assert torch.equal(part.dequantize(), weight.dequantize()[start:31])


@pytest.mark.parametrize(
    ("config", "message"),
    [({"version": "gemv"}, "'gemv'"), ({"bits": 3}, "3 bits"), ({"zero_point": False}, "zero_point False")],
)
def test_refusals(config, message):
    with pytest.raises(FormatError, match=message):
        AWQFormat.from_config({"quant_method": "awq", "bits": 4, "group_size": 128, **config}, ())


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (WeightScheme("int", 3, "group", 32, symmetric=False), None, "--bits 4 --asym"),
        (WeightScheme("int", 4, "group", 32), None, "--bits 4 --asym"),
        (WeightScheme("int", 4, "group", 32, symmetric=False), (12, 64), "multiple of 8"),
    ],
)
def test_what_cannot_be_written_is_refused(scheme, shape, message):
    with pytest.raises(FormatError, match=message):
        AWQWriter().check(scheme, shape)


def test_a_scale_that_float16_cannot_hold_is_refused():
    scheme = WeightScheme("int", 4, "channel", symmetric=False)
    zero = torch.zeros(8, 1, dtype=torch.int8)
    q = pack_int32(torch.zeros(8, 8, dtype=torch.int8), 4)
    for scale in (1e6, 1e-12):
        with pytest.raises(FormatError, match="float16"):
            AWQWriter().tensors("a", QuantizedWeight(scheme, (8, 8), q, torch.full((8, 1), scale), zero))


def test_one_folder_has_one_scheme():
    schemes = {"a": WeightScheme("int", 4, "group", 32, False), "b": WeightScheme("int", 4, "group", 64, False)}
    with pytest.raises(FormatError, match="one group size"):
        AWQWriter().config(schemes, [])
