"""Packing against compressed-tensors' own code, and the arithmetic of dequantization."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.quantize.formats.quantized_weight import FormatError, QuantizedWeight, WeightScheme, pack_int32, unpack_int32


@st.composite
def integers(draw):
    bits = draw(st.integers(2, 8))
    rows, n = draw(st.integers(1, 9)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    half = 1 << (bits - 1)
    return bits, torch.randint(-half, half, (rows, n), generator=generator, dtype=torch.int8)


@given(integers())
@settings(max_examples=60, deadline=None)
def test_pack_equals_compressed_tensors_and_unpack_inverts_it(case):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    bits, q = case
    packed = pack_int32(q, bits)
    assert torch.equal(packed, pack_to_int32(q, bits))
    assert torch.equal(unpack_int32(packed, bits, q.shape[1]), q)


def test_one_bit_is_refused_by_name():
    with pytest.raises(FormatError, match="1-bit"):
        pack_int32(torch.zeros(1, 8, dtype=torch.int8), 1)


def test_dequantize_is_the_definition_element_by_element():
    torch.manual_seed(0)
    q = torch.randint(-8, 8, (3, 32), dtype=torch.int8)
    scale = torch.rand(3, 2) + 0.5
    zero_point = torch.randint(-8, 8, (3, 2), dtype=torch.int8)
    weight = QuantizedWeight(
        WeightScheme("int", 4, "group", 16, symmetric=False), (3, 32), pack_int32(q, 4), scale, zero_point
    )
    dense = weight.dequantize()
    for o in range(3):
        for i in range(32):
            g = i // 16
            assert dense[o, i].item() == pytest.approx((q[o, i].item() - zero_point[o, g].item()) * scale[o, g].item())


def test_column_order_says_which_input_a_stored_column_multiplies():
    torch.manual_seed(1)
    scheme = WeightScheme("int", 4, "group", 16, symmetric=False)
    q = torch.randint(-8, 8, (4, 64), dtype=torch.int8)
    plain = QuantizedWeight(scheme, (4, 64), pack_int32(q, 4), torch.rand(4, 4), torch.ones(4, 4, dtype=torch.int8))
    order = torch.randperm(64)
    shuffled = replace(plain, column_order=order)
    assert torch.equal(shuffled.dequantize()[:, order], plain.dequantize())
    x = torch.rand(3, 64)
    torch.testing.assert_close(x @ shuffled.dequantize().T, x[:, order] @ shuffled.dequantize_as_stored().T)


def test_num_bytes_counts_every_tensor():
    q = torch.zeros(8, 64, dtype=torch.int8)
    weight = QuantizedWeight(
        WeightScheme("int", 4, "group", 32), (8, 64), pack_int32(q, 4), torch.ones(8, 2, dtype=torch.bfloat16)
    )
    assert weight.num_bytes == 8 * 64 // 2 + 8 * 2 * 2
