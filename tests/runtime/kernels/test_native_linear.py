"""Products by every instruction set against float64: random shapes, tails, strides, memory that must stay as it was."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_weights import make

from llmq.quantize.formats.packing import pack_unsigned, unpack_unsigned
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import ActivationScheme
from llmq.runtime.kernels import native, why_absent
from llmq.runtime.layers.linear import QuantizedActivationLinear
from llmq.runtime.layers.native_linear import NativeLinear, rounded_to_int8
from llmq.runtime.layers.rounded_input import round_input

pytestmark = pytest.mark.skipif(native is None, reason=f"no native kernels here: {why_absent}")

ISAS = native.isas() if native is not None else ()
POISON = -(2.0**120)  # no product comes near it, and bf16 holds it


@pytest.fixture(params=ISAS)
def isa(request):
    native.force_isa(request.param)
    yield request.param
    native.force_isa(native.native_isa())


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    before = native.num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)


def product(linear: NativeLinear, activations, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Into the middle of poisoned memory, of which nothing else may change and everything inside must."""
    rows, out = x.shape[0], linear.out_features
    memory = torch.full((rows + 2, out + 5), POISON, dtype=dtype)
    y = memory[1:-1, 3:-2]
    native.linear(
        linear.packed,
        activations,
        linear.input_scale,
        x.data_ptr(),
        rows,
        x.stride(0),
        y.data_ptr(),
        memory.stride(0),
        dtype == torch.float32,
    )
    made = y.clone()
    y.fill_(POISON)
    assert bool((memory == torch.tensor(POISON, dtype=dtype)).all())
    assert not bool((made == torch.tensor(POISON, dtype=dtype)).any())
    return made


def input_of(rows: int, in_: int, seed: int) -> torch.Tensor:
    """bf16, rows apart from each other, what lies between them NaN."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((rows, in_ + 6), float("nan"), dtype=torch.bfloat16)
    x = memory[:, 2 : in_ + 2]
    x.copy_(torch.randn(rows, in_, generator=generator))
    return x


def rounded(x: torch.Tensor, group_size: int | None, in_: int) -> torch.Tensor:
    """What int8 activations stand for, float64: by groups of the (reordered) input, or by rows."""
    padded = torch.nn.functional.pad(x.float(), (0, -in_ % group_size if group_size else 0))
    groups = padded.unflatten(1, (-1, group_size or in_))
    most = groups.abs().amax(2, keepdim=True).clamp(min=1e-12)
    scale = most / (127 if group_size else 127.5)
    q = (groups * (torch.tensor(127.0) / most) if group_size else groups / scale).round().clamp(-128, 127)
    return (q.double() * scale.double()).flatten(1)[:, :in_]


def check(
    made: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, step: torch.Tensor | float = 0
) -> None:
    """float32 sums of exact products: each within what rounding may do to a sum of this many terms, n u of the sum of
    their sizes (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). `step`: the scale of an integer weight's
    numbers, which are up to 256 from a zero that is subtracted after they are summed."""
    expected = x.double() @ weight.double().T
    size = x.double().abs() @ (weight.double().abs() + 256 * step).T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    error = (made.double() - expected).abs() / size.clamp(min=1e-30)
    assert error.max() < (x.shape[1] + 8) * 2.0**-24


ROWS = st.one_of(st.integers(1, 40), st.sampled_from([95, 97, 130, 300, 1024]))
SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 700))


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, shape=SHAPES, has_bias=st.booleans(), seed=st.integers(0, 999))
def bf16_case(rows, shape, has_bias, seed):
    out, in_ = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, in_, generator=generator).bfloat16()
    bias = torch.randn(out, generator=generator) if has_bias else None
    x = input_of(rows, in_, seed + 1)
    linear = NativeLinear(weight, bias)
    made = product(linear, linear.activations, x, torch.float32)
    check(made, x, weight, bias)
    assert torch.equal(product(linear, linear.activations, x, torch.bfloat16), made.bfloat16())


def test_bf16_weights(isa):
    bf16_case()


INTEGERS = st.sampled_from(
    [
        (bits, strategy, zero, outer)
        for bits in (4, 8)
        for strategy in ("group", "channel", "tensor")
        for zero in (None, "int")
        for outer in (0,)
    ]
    + [(4, "group", "float", 0), (4, "group", "float", 2), (8, "group", "float", 0), (4, "group", None, 2)]
    + [(bits, "group", zero, 0) for bits in (2, 3, 5, 6) for zero in (None, "int", "float")]
    + [(3, "channel", "int", 0), (6, "group", None, 2), (6, "group", None, 16), (5, "group", "float", 8)]
)


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    shape=SHAPES,
    case=INTEGERS,
    group_size=st.sampled_from([16, 24, 32, 64, 128, 256]),
    scale_dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    order=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 999),
)
def integer_case(rows, shape, case, group_size, scale_dtype, order, has_bias, seed):
    bits, strategy, zero, outer = case
    out, in_ = shape
    if outer:
        in_ = max(1, in_ // (outer * group_size)) * outer * group_size
    order = order and strategy == "group"
    weight = make("int", bits, strategy, out, in_, seed, zero=zero, outer=outer, group_size=group_size, order=order)
    if not outer:
        weight = with_scales(weight, scale_dtype)
    bias = torch.randn(out, generator=torch.Generator().manual_seed(seed)) if has_bias else None
    x = input_of(rows, in_, seed + 1)
    linear = NativeLinear(weight, bias)
    dense, step = exact(weight)
    ordered = x if weight.column_order is None else x[:, weight.column_order]
    made = product(linear, native.Activations.exact, x, torch.float32)
    check(made, ordered, dense, bias, step)
    assert torch.equal(product(linear, native.Activations.exact, x, torch.bfloat16), made.bfloat16())
    by_group = group_size if strategy == "group" else in_
    made = product(linear, native.Activations.int8_group, x, torch.float32)
    check(made, rounded(ordered, by_group, in_), dense, bias, step)
    made = product(linear, native.Activations.int8_row, x, torch.float32)
    check(made, rounded(ordered, None, in_), dense, bias, step)


def with_scales(weight: QuantizedWeight, dtype: torch.dtype) -> QuantizedWeight:
    return weight._with(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def exact(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [out, in], in the stored order of columns, and the scale of each number where they are asymmetric."""
    out, in_ = weight.shape
    scales, offsets = weight.scales().double(), weight.offsets()
    q = weight.integers().double()
    columns = weight.scheme.group_size if weight.scheme.strategy == "group" else in_

    def spread(per_group: torch.Tensor) -> torch.Tensor:
        return per_group.double().expand(out, -1).repeat_interleave(columns, 1)[:, :in_]

    if offsets is not None:
        return (q + (1 << (weight.scheme.bits - 1))) * spread(scales) + spread(offsets), spread(scales)
    if weight.zero_point is not None:
        return (q - spread(weight.zero_point)) * spread(scales), spread(scales)
    # AVX2 multiplies numbers as they are stored, and subtracts a symmetric zero likewise.
    return q * spread(scales), spread(scales) if native.isa() == "avx2" else torch.zeros(out, in_)


def test_integer_weights(isa):
    integer_case()


def in_four_bits(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers; an offset goes along with the middle of the range."""
    scheme = weight.scheme
    u = unpack_unsigned(weight.values, scheme.bits, weight.in_features)
    up = 4 if weight.offset is not None else 8 - (1 << (scheme.bits - 1))
    return dataclasses.replace(
        weight,
        scheme=dataclasses.replace(scheme, bits=4),
        values=pack_unsigned(u + up, 4),
        offset=None if weight.offset is None else weight.offset - up * weight.scale,
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    shape=SHAPES,
    bits=st.sampled_from([2, 3]),
    strategy=st.sampled_from(["group", "channel", "tensor"]),
    zero=st.sampled_from([None, "int", "float"]),
    group_size=st.sampled_from([8, 16, 24, 64, 128]),
    order=st.booleans(),
    seed=st.integers(0, 999),
)
def three_bits_case(rows, shape, bits, strategy, zero, group_size, order, seed):
    (out, in_), generator = shape, torch.Generator().manual_seed(seed)
    order = order and strategy == "group"
    weight = make("int", bits, strategy, out, in_, seed, zero=zero, group_size=group_size, order=order)
    # Small multiples of a sixteenth: an offset's place changes without rounding.
    scale, offset = (torch.randint(1, 64, weight.scale.shape, generator=generator) / 16 for _ in range(2))
    weight = dataclasses.replace(weight, scale=scale, offset=offset if zero == "float" else None)
    three, four = NativeLinear(weight, None), NativeLinear(in_four_bits(weight), None)
    assert [linear.packed_facts["numbers"] for linear in (three, four)] == ["int3", "int4"]
    assert three.packed_facts["scales"] == four.packed_facts["scales"]
    assert three.tensors["numbers"].nbytes * 4 == four.tensors["numbers"].nbytes * 3
    x = input_of(rows, in_, seed + 1)
    for mode in (native.Activations.exact, native.Activations.int8_group, native.Activations.int8_row):
        assert torch.equal(product(three, mode, x, torch.float32), product(four, mode, x, torch.float32))


def test_three_bits_compute_to_the_last_bit_as_four_do(isa):
    three_bits_case()


@pytest.mark.parametrize(
    ("bits", "zero", "outer", "scale_dtype"),
    [(4, "float", 8, torch.uint8), (6, None, 16, torch.int8), (3, None, 1, torch.int8), (4, "float", 3, torch.uint8)],
)
def test_scales_of_two_parts_stay_small_and_compute_as_whole_ones(isa, bits, zero, outer, scale_dtype):
    """GGUF's K blocks: a byte a group instead of four, and the same product to the last bit."""
    weight = make("int", bits, "group", 100, 96 * 16, seed=5, zero=zero, outer=outer)
    if scale_dtype == torch.int8:
        generator = torch.Generator().manual_seed(6)
        signed = torch.randint(-128, 128, weight.scale.shape, generator=generator).to(torch.int8)
        weight = dataclasses.replace(weight, scale=signed)
    whole = dataclasses.replace(
        weight, scale=weight.scales(), offset=weight.offsets(), outer_scale=None, outer_offset=None
    )
    small, large = NativeLinear(weight, None), NativeLinear(whole, None)
    assert large.packed_facts["scales"] == "fp32"
    is_small = outer.bit_count() == 1
    assert small.packed_facts["scales"] == ("int8" if is_small else "fp32")
    num_scales = large.tensors["scales"].numel() * (1 if zero is None else 2)
    if is_small:
        assert large.num_bytes - small.num_bytes == num_scales * 4 - num_scales - 2 * num_scales // outer
    for rows in (1, 2, 5, 16, 40):
        x = input_of(rows, 96 * 16, rows)
        for mode in (native.Activations.exact, native.Activations.int8_group, native.Activations.int8_row):
            assert torch.equal(product(small, mode, x, torch.float32), product(large, mode, x, torch.float32))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("int4", "exact"),
        ("int4", "int8_group"),
        ("int3", "exact"),
        ("int3", "int8_group"),
        ("int8", "exact"),
        ("int8", "int8_row"),
        ("bf16", "exact"),
        ("fp8", "exact"),
        ("fp8", "fp8_row"),
        ("fp8", "fp8_group"),
    ],
)
def test_a_row_is_the_same_whatever_is_beside_it(isa, kind, mode):
    out, in_, strategy = 72, 1200, "channel" if mode.endswith("row") else "group"
    if kind == "bf16":
        weight = torch.randn(out, in_).bfloat16()
    elif kind == "fp8":
        weight = fp8_weight(strategy, "exact", out, in_, 80, 1)
    else:
        weight = make("int", int(kind[3:]), strategy, out, in_, 1, zero="int", group_size=80)
    linear = NativeLinear(weight, None)
    x = input_of(230, in_, 0)
    activations = getattr(native.Activations, mode)
    whole = product(linear, activations, x, torch.float32)
    for first, count in [(0, 1), (1, 2), (3, 3), (7, 4), (11, 5), (20, 13), (40, 97), (100, 130)]:
        part = product(linear, activations, x[first : first + count], torch.float32)
        assert torch.equal(part, whole[first : first + count]), count


@pytest.mark.parametrize("mode", ["int8_group", "int8_row"])
@pytest.mark.parametrize(("bits", "strategy", "group_size"), [(4, "group", 64), (4, "group", 24), (8, "channel", None)])
def test_integer_sums_are_the_same_to_the_last_bit_by_every_instruction_set(mode, bits, strategy, group_size):
    """They are exact, and scaled in the same order."""
    kwargs = {} if group_size is None else {"group_size": group_size}
    linear = NativeLinear(make("int", bits, strategy, 150, 680, 2, zero="int", **kwargs), None)
    try:
        for rows in (1, 4, 5, 16, 17, 40, 130, 300):
            x, made = input_of(rows, 680, rows), []
            for name in ISAS:
                native.force_isa(name)
                made.append(product(linear, getattr(native.Activations, mode), x, torch.float32))
            assert all(torch.equal(one, made[0]) for one in made), rows
    finally:
        native.force_isa(native.native_isa())


def test_int8_products_are_those_of_torch(isa):
    """A W8A8 checkpoint computes the same integers, scaled in the same order, as by torch's own integer product."""
    scheme = ActivationScheme("int", 8, dynamic=True)
    generator = torch.Generator().manual_seed(3)
    weight = make("int", 8, "channel", 96, 300, 3)
    weight = type(weight)(
        type(weight.scheme)("int", 8, "channel", activation=scheme, layout="int-quantized"),
        (96, 300),
        torch.randint(-128, 128, (96, 300), generator=generator, dtype=torch.int8),
        weight.scale,
    )
    linear = NativeLinear(weight, None)
    for rows in (1, 4, 33):
        x = input_of(rows, 300, rows)
        scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127.5
        q = (x.float() / scale).round().clamp(-128, 127).to(torch.int8)
        expected = torch._int_mm(q, weight.values.T).float() * scale * weight.scale.float().T
        assert torch.equal(product(linear, linear.activations, x, torch.float32), expected)
        assert torch.equal(linear(x), expected.bfloat16())


FP8 = st.sampled_from(
    [
        (strategy, kind)
        for strategy in ("tensor", "channel", "group", "block")
        for kind in ("exact", "dynamic", "static", "grouped")
        if kind != "grouped" or strategy in ("group", "block")
    ]
)


def fp8_weight(strategy: str, activation: str, out: int, in_: int, group_size: int, seed: int) -> QuantizedWeight:
    """Of all e4m3 numbers but NaN, those below 2**-6 too. `activation`: of `FP8`."""
    weight = make("float", 8, strategy, out, in_, seed, block_rows=8, group_size=group_size)
    codes = torch.randint(0, 127, (out, in_), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    signs = torch.randint(0, 2, (out, in_), generator=torch.Generator().manual_seed(seed + 1), dtype=torch.uint8)
    size = group_size if activation == "grouped" else None
    scheme = None if activation == "exact" else ActivationScheme("float", 8, activation != "static", size)
    return dataclasses.replace(
        weight,
        scheme=dataclasses.replace(weight.scheme, activation=scheme),
        values=(codes | signs << 7).view(torch.float8_e4m3fn),
        input_scale=torch.tensor(0.003) if activation == "static" else None,
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    shape=SHAPES,
    case=FP8,
    group_size=st.sampled_from([8, 16, 24, 128]),
    has_bias=st.booleans(),
    seed=st.integers(0, 999),
)
def fp8_case(rows, shape, case, group_size, has_bias, seed):
    out, in_ = shape
    weight = fp8_weight(*case, out, in_, group_size, seed)
    bias = torch.randn(out, generator=torch.Generator().manual_seed(seed)) if has_bias else None
    x = input_of(rows, in_, seed + 1)
    assert NativeLinear.runs(weight, torch.bfloat16)
    linear = NativeLinear(weight, bias)
    made = product(linear, linear.activations, x, torch.float32)
    scheme, inputs = weight.scheme.activation, x.double()
    if scheme is not None:
        q, scale = round_input(x.float(), scheme, weight.input_scale)
        columns = in_ if scheme.group_size is None else scheme.group_size
        inputs = q.double() * scale.double().repeat_interleave(columns, 1)[:, :in_]
    columns = group_size if weight.scheme.strategy in ("group", "block") else in_
    scales = weight.spread_blocks().scales().double().expand(out, -1)
    dense = weight.values.float().double() * scales.repeat_interleave(columns, 1)[:, :in_]
    check(made, inputs, dense, bias)
    assert torch.equal(linear(x), made.bfloat16())


def test_fp8_weights(isa):
    fp8_case()


def test_fp8_products_are_those_of_torch(isa):
    """Of numbers whose sums are exact in float32, scaled in the same order; but torch rounds a sum before it scales."""
    generator = torch.Generator().manual_seed(0)
    weight = fp8_weight("channel", "dynamic", 96, 304, 16, 3)
    values = torch.randint(-16, 17, (96, 304), generator=generator).float()
    weight = dataclasses.replace(weight, values=values.to(torch.float8_e4m3fn))
    x = torch.randint(-16, 17, (33, 304), generator=generator).bfloat16()
    x[:, 0] = 100.0
    q, scale = round_input(x.float(), weight.scheme.activation, None)
    expected = (q @ values.T) * scale * weight.scale.T
    linear = NativeLinear(weight, None)
    for rows in (1, 3, 33):
        assert torch.equal(product(linear, linear.activations, x[:rows], torch.float32), expected[:rows])
    by_torch = QuantizedActivationLinear(weight, None, torch.bfloat16)(x).float()
    assert float((by_torch - expected).abs().div(expected.abs()).nan_to_num().max()) < 2**-7


def test_fp8_inputs_round_as_torch_does(isa):
    """An identity shows what the input became: of every half way between two e4m3 numbers, and beyond the largest."""
    numbers = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, between, between * (1 - 2**-7), between * (1 + 2**-7), torch.tensor([463.0, 500.0, 1e30])])
    x = torch.cat([x, -x]).bfloat16()
    x = torch.nn.functional.pad(x, (0, -len(x) % 8))
    weight = fp8_weight("tensor", "static", len(x), len(x), 16, 0)
    weight = dataclasses.replace(
        weight,
        values=torch.eye(len(x)).to(torch.float8_e4m3fn),
        scale=torch.ones(1, 1),
        input_scale=torch.tensor(1.0),
    )
    linear = NativeLinear(weight, None)
    expected = round_input(x.float()[None], weight.scheme.activation, weight.input_scale)[0]
    assert torch.equal(product(linear, linear.activations, x[None], torch.float32), expected)
    x[3] = torch.nan
    assert bool(linear(x[None]).isnan().all())


def test_fp8_that_has_no_native_product():
    fine = fp8_weight("channel", "dynamic", 16, 32, 16, 0)
    nan = fine.values.view(torch.uint8).clone()
    nan[3, 4] = 0xFF
    grouped = ActivationScheme("float", 8, True, 16)
    assert NativeLinear.runs(fine, torch.bfloat16)
    assert not NativeLinear.runs(dataclasses.replace(fine, values=nan.view(torch.float8_e4m3fn)), torch.bfloat16)
    for scheme in (grouped, ActivationScheme("int", 8)):
        other = dataclasses.replace(fine, scheme=dataclasses.replace(fine.scheme, activation=scheme))
        assert not NativeLinear.runs(other, torch.bfloat16)


def test_int8_activations_are_asked_for(isa):
    """Of weights that bring no scheme for them; what else a linear is stays."""
    weight, x = make("int", 4, "group", 48, 256, 0, group_size=64), input_of(7, 256, 1)
    exact_linear, linear = NativeLinear(weight, None), NativeLinear(weight, None, int8_activations=True)
    assert (exact_linear.kernel, linear.kernel) == (f"native int4, {isa}", f"native int4 × int8, {isa}")
    made = product(linear, linear.activations, x, torch.float32)
    assert torch.equal(linear(x), made.bfloat16())
    error = float((made - product(exact_linear, exact_linear.activations, x, torch.float32)).norm() / made.norm())
    assert 1e-3 < error < 2e-2


def test_a_dense_weight_is_rounded_by_rows():
    weight = torch.randn(5000, 24, generator=torch.Generator().manual_seed(0)).bfloat16()  # in more than one piece
    weight[17] = 0
    made = rounded_to_int8(weight)
    assert float((made.dequantize() - weight.float()).abs().max(dim=1).values.sub(made.scale[:, 0] / 2).max()) < 1e-6
    assert made.values.abs().amax(dim=1).eq(127).sum() == 4999
    assert torch.equal(made.dequantize()[17], torch.zeros(24))


def test_a_dense_weight_is_rounded_by_groups():
    """No number is further from its own than half a step, and what a bf16 scale is off itself."""
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:, 70] *= 1000
    made = rounded_to_int8(weight, 64)
    assert (made.scheme.strategy, made.scheme.group_size, made.scale.shape) == ("group", 64, (40, 3))
    error = (made.dequantize() - weight.float()).abs().unflatten(1, (3, 64)).amax(dim=2)
    largest = weight.float().abs().unflatten(1, (3, 64)).amax(dim=2)
    assert bool((error <= largest * (0.5 / 127 + 2**-8)).all())
    assert made.values.abs().max() == 127


def test_not_a_number_stays_in_its_row(isa):
    weight = make("int", 4, "group", 40, 64, 0, group_size=32)
    x = input_of(20, 64, 0).contiguous()
    x[7, 5] = float("nan")
    x[9, 5] = float("inf")
    made = NativeLinear(weight, None)(x)
    assert bool(made[7].isnan().all())
    clean = [row for row in range(20) if row not in (7, 9)]
    assert bool(made[clean].isfinite().all())
    assert not bool(made[9].isfinite().any())


@pytest.mark.parametrize("mode", ["int8_group", "int8_row"])
@pytest.mark.parametrize("column", [5, 66])  # 66: behind the last whole vector
def test_not_a_number_stays_in_its_row_when_it_is_rounded(isa, mode, column):
    linear = NativeLinear(make("int", 4, "group", 40, 70, 0, group_size=32), None)
    x = input_of(20, 70, 0).contiguous()
    x[7, column] = float("nan")
    x[9, column] = float("-inf")
    made = product(linear, getattr(native.Activations, mode), x, torch.float32)
    assert bool(made[7].isnan().all())
    assert not bool(made[9].isfinite().any())
    assert bool(made[[row for row in range(20) if row not in (7, 9)]].isfinite().all())
