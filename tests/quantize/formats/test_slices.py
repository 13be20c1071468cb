"""Every kind of QuantizedWeight: its meaning element by element, its slices, and several stacked."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_weights import KINDS, make

from llmq.quantize.formats.packing import e2m1_to, to_e2m1
from llmq.quantize.formats.quantized_weight import pack_int32
from llmq.quantize.formats.scheme import FormatError
from llmq.quantize.formats.stacked import stack_rows

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def by_definition(weight):
    """float64, one element at a time."""
    scheme, (out, in_) = weight.scheme, weight.shape
    half = 1 << (scheme.bits - 1)
    numbers = weight.integers()
    dense = torch.zeros(out, in_, dtype=torch.float64)
    for o in range(out):
        row = {"tensor": 0, "block": o // (scheme.block_rows or 1)}.get(scheme.strategy, o)
        for j in range(in_):
            g = j // scheme.group_size if scheme.group_size else 0
            n = float(numbers[o, j])

            def whole(inner, outer, row=row, o=o, j=j, g=g):
                wide = 1.0 if outer is None else float(outer[o, j * outer.shape[1] // in_])
                return float(inner[row, g]) * wide

            scale = whole(weight.scale, weight.outer_scale)
            if weight.offset is not None:
                value = (n + half) * scale + whole(weight.offset, weight.outer_offset)
            else:
                value = (n - (0 if weight.zero_point is None else float(weight.zero_point[row, g]))) * scale
            dense[o, j if weight.column_order is None else weight.column_order[j]] = value
    return dense


@settings(max_examples=60, deadline=None)
@given(KINDS, st.integers(0, 2**31), st.booleans())
def test_the_definition(case, seed, order):
    kind, bits, strategy, more = case
    weight = make(kind, bits, strategy, 12, 64, seed, order=order and strategy == "group", **more)
    torch.testing.assert_close(weight.dequantize().double(), by_definition(weight), rtol=1e-6, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(KINDS, st.integers(0, 2**31), st.data())
def test_slices_are_slices(case, seed, data):
    kind, bits, strategy, more = case
    weight = make(kind, bits, strategy, 24, 128, seed, **more)
    dense = weight.dequantize()
    start = data.draw(st.integers(0, 23))
    stop = data.draw(st.integers(start + 1, 24))
    rows = weight.slice_rows(start, stop)
    assert rows.shape == (stop - start, 128)
    assert torch.equal(rows.dequantize(), dense[start:stop])
    steps = 128 // weight.column_step
    first = data.draw(st.integers(0, steps - 1))
    last = data.draw(st.integers(first + 1, steps))
    columns = weight.slice_columns(first * weight.column_step, last * weight.column_step)
    part = dense[:, first * weight.column_step : last * weight.column_step]
    assert torch.equal(columns.dequantize(), part)
    assert torch.equal(columns.slice_rows(start, stop).dequantize(), part[start:stop])
    assert columns.num_bytes <= weight.num_bytes


@settings(max_examples=60, deadline=None)
@given(KINDS, st.integers(0, 2**31))
def test_stacked_rows_are_the_rows_of_each(case, seed):
    kind, bits, strategy, more = case
    parts = [make(kind, bits, strategy, out, 64, seed + out, **more) for out in (16, 12, 20)]
    stacked = stack_rows(parts)
    assert stacked.shape == (48, 64)
    assert torch.equal(stacked.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_weights_of_one_row_of_blocks_are_stacked():
    parts = [make("float", 8, "block", 8, 64, seed, block_rows=8) for seed in range(3)]
    assert torch.equal(stack_rows(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_a_part_of_the_only_group_is_a_row_of_its_own_scale():
    weight = make("int", 4, "group", 8, 64, 0, group_size=64, zero="int")
    part = weight.slice_columns(16, 32)
    assert part.scheme.strategy == "channel"
    assert torch.equal(part.dequantize(), weight.dequantize()[:, 16:32])


def test_what_differs_is_not_stacked():
    weight = make("int", 4, "group", 8, 64, 0, order=True)
    other = replace(weight, column_order=weight.column_order.flip(0))
    assert stack_rows([weight, weight]).out_features == 16
    assert stack_rows([weight, other]) is None
    assert stack_rows([weight, make("int", 8, "group", 8, 64, 0)]) is None
    assert stack_rows([replace(weight, input_scale=torch.tensor(1.0)), weight]) is None


def test_a_slice_inside_a_group_is_refused_with_the_sizes_that_work():
    weight = make("int", 4, "group", 8, 576, 0, group_size=64)
    assert weight.column_step == 64
    with pytest.raises(FormatError, match="multiple of 64; equal parts: 576, 192, 64"):
        weight.slice_columns(0, 288)


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), zero=st.sampled_from([None, "int"]), seed=st.integers(0, 99), data=st.data())
def test_columns_of_a_weight_in_activation_order(bits, zero, seed, data):
    weight = make("int", bits, "group", 8, 96, seed, zero=zero, order=True)
    start = data.draw(st.integers(0, 95))
    stop = data.draw(st.integers(start + 1, 96))
    part = weight.slice_columns(start, stop)
    assert torch.equal(part.dequantize(), weight.dequantize()[:, start:stop])
    assert torch.equal(part.slice_rows(2, 5).dequantize(), weight.dequantize()[2:5, start:stop])
    # An ordinary weight in groups of 32, at most 31 columns of each of its 6 groups being filled up.
    assert part.scheme.group_size == 32
    assert part.in_features % 32 == 0
    assert part.in_features <= stop - start + 6 * 31
    x = torch.randn(3, stop - start)
    product = x.index_select(1, part.column_order) @ part.dequantize_as_stored().T
    torch.testing.assert_close(product, x @ weight.dequantize()[:, start:stop].T, rtol=1e-4, atol=1e-4)


def test_what_fills_up_a_run_is_zero_and_of_its_own_group():
    weight = make("int", 4, "group", 8, 96, 3, zero="int", order=True)
    part = weight.slice_columns(0, 48)
    stored = part.dequantize_as_stored()
    groups = weight.scheme.group_size * torch.arange(6).repeat_interleave(16)
    group_of_input = torch.empty(96, dtype=torch.int64).index_copy_(0, weight.column_order, groups)
    for run in range(part.in_features // 32):
        columns = part.column_order[32 * run : 32 * run + 32]
        assert len(set(group_of_input[columns].tolist())) == 1
        first = {int(column): place for place, column in reversed(list(enumerate(columns)))}
        more = [place for place, column in enumerate(columns) if first[int(column)] != place]
        assert (stored[:, 32 * run : 32 * run + 32][:, more] == 0).all()
    with pytest.raises(FormatError, match="cut them out of the whole"):
        part.slice_columns(0, 8)


def test_slices_share_the_memory_of_the_whole():
    weight = make("int", 4, "group", 8, 64, 0)
    part = weight.slice_rows(2, 4).slice_columns(16, 48)
    assert part.values.untyped_storage().data_ptr() == weight.values.untyped_storage().data_ptr()
    assert part.contiguous().values.untyped_storage().nbytes() == 2 * 32 // 2


def test_e2m1_is_its_table_and_rounds_to_the_nearest():
    codes = torch.arange(16, dtype=torch.uint8)
    table = torch.tensor([*E2M1, *(-number for number in E2M1)])
    assert torch.equal(e2m1_to(codes, torch.float32), table)
    assert torch.equal(to_e2m1(table), codes)
    x = torch.linspace(-7, 7, 2001)
    nearest = (x[:, None] - table).abs().min(dim=1).values
    torch.testing.assert_close((e2m1_to(to_e2m1(x), torch.float32) - x).abs(), nearest)
    assert to_e2m1(torch.tensor([0.25, 0.75, 2.5, 5.0, 100.0])).tolist() == [0, 2, 4, 6, 7]  # ties to even


def test_bf16_rounds_once():
    weight = make("int", 4, "group", 8, 64, 0, zero="int")
    weight = replace(weight, scale=weight.scale.bfloat16())
    assert torch.equal(weight.dequantize(torch.bfloat16), weight.dequantize().bfloat16())


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_streams_of_odd_bits_are_dense(bits):
    assert pack_int32(torch.zeros(4, 96, dtype=torch.int8), bits).numel() * 32 == 4 * 96 * bits
