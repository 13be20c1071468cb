"""Tiles of AMX, emulated: each operation against the pseudo code of Intel's manual, in exact arithmetic, and when tiles
are used at all. No machine with AMX has run them."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from random_weights import make

from llmq.profiles.machine import cpu_flags
from llmq.runtime.kernels import native, why_absent
from llmq.runtime.layers import tile_check
from llmq.runtime.layers.native_linear import NativeLinear

pytestmark = pytest.mark.skipif(native is None, reason=f"no native kernels here: {why_absent}")


@pytest.fixture
def emulated_tiles():
    native.force_isa("amx_emulated")
    yield
    native.force_isa(native.native_isa())


def bf16_value(bits: int) -> float:
    """A denormal is a zero."""
    return 0.0 if bits & 0x7F80 == 0 else struct.unpack("f", struct.pack("I", bits << 16))[0]


def rounded(exact: Fraction) -> float:
    """To float32: the nearest, ties to even; what is below the least normal number once it is rounded becomes 0."""
    if exact == 0:
        return 0.0
    size, sign = abs(exact), -1.0 if exact < 0 else 1.0
    exponent = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
    exponent += (size >= Fraction(2) ** (exponent + 1)) - (size < Fraction(2) ** exponent)
    step = Fraction(2) ** (exponent - 23)
    nearest = round(size / step) * step
    if nearest >= Fraction(2) ** 128:
        return sign * math.inf
    return 0.0 if nearest < Fraction(2) ** -126 else sign * float(nearest)


def multiply_add(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    return rounded(Fraction(a) * Fraction(b) + Fraction(c))


def add(a: float, b: float) -> float:
    return multiply_add(a, 1.0, b)


def tile_sums(x: list[int], w: list[int], sums: float = 0.0) -> float:
    """One output of TDPBF16PS over tiles of 32 inputs: the even inputs and the odd ones are sums of their own."""
    for first in range(0, len(x), 32):
        even = odd = 0.0
        for k in range(first, min(first + 32, len(x)), 2):
            even = multiply_add(bf16_value(x[k]), bf16_value(w[k]), even)
            odd = multiply_add(bf16_value(x[k + 1]), bf16_value(w[k + 1]), odd)
        sums = add(sums, add(even, odd))
    return sums


def bf16_of(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def check_bits(x: torch.Tensor, w: torch.Tensor) -> list[float]:
    """bf16 numbers as they lie, [rows, in] and [out, in]."""
    made = torch.full((len(x), len(w)), torch.nan)
    linear = NativeLinear(bf16_of(w), None)
    inputs = bf16_of(x).contiguous()
    native.linear(
        linear.packed,
        linear.activations,
        linear.input_scale,
        inputs.data_ptr(),
        len(x),
        inputs.stride(0),
        made.data_ptr(),
        made.stride(0),
        True,
    )
    expected = [[tile_sums(a, b) for b in w.tolist()] for a in x.tolist()]
    for row, of_row in zip(made.tolist(), expected, strict=True):
        for one, other in zip(row, of_row, strict=True):
            assert one == other or (math.isnan(one) and math.isnan(other))
    return [one for of_row in expected for one in of_row]


@pytest.mark.parametrize("rows", [1, 3, 16, 19])
def test_bf16_sums_are_those_of_the_manual_to_the_last_bit(emulated_tiles, rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(0x3C00, 0x4100, (rows, 96), generator=generator)
    w = torch.randint(0x3C00, 0x4100, (17, 96), generator=generator)
    signs = torch.randint(0, 2, (17, 96), generator=generator) << 15
    assert all(math.isfinite(one) for one in check_bits(x, w | signs))


def test_denormals_are_zeros_before_and_behind(emulated_tiles):
    generator = torch.Generator().manual_seed(5)
    # Products around 2^-126: of some the sums are denormal on the way, of some the inputs are.
    x = torch.randint(0x1D00, 0x2180, (5, 64), generator=generator)
    w = torch.randint(0x1D00, 0x2180, (16, 64), generator=generator)
    x |= torch.randint(0, 2, (5, 64), generator=generator) << 15
    x[:, ::7] = torch.randint(1, 0x80, (5, 10), generator=generator)
    w[:, ::7] = 0x7E00
    sums = check_bits(x, w)
    assert any(sums)
    assert 0.0 in check_bits(x[:, :2].clone().fill_(0x0040), w[:, :2].clone().fill_(0x3F80))


def test_what_is_not_finite(emulated_tiles):
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0x3C00, 0x4100, (4, 64), generator=generator)
    w = torch.randint(0x3C00, 0x4100, (18, 64), generator=generator)
    x[0, 3], x[1, 40], x[2, 5], x[3, 0] = 0x7F80, 0x7FC0, 0xFF80, 0x7F7F
    w[2, 3], w[4, 5], w[5, 0], w[6, 9] = 0, 0x7F80, 0x7F7F, 0x7FC1
    sums = check_bits(x, w)
    assert any(math.isnan(one) for one in sums)
    assert math.inf in sums
    assert -math.inf in sums


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 33])
@pytest.mark.parametrize("in_", [64, 40, 200])
def test_integer_sums_at_their_extremes(emulated_tiles, rows, in_):
    """Each product of bytes is as large as it gets."""
    weight = make("int", 8, "channel", 35, in_, 1)
    numbers = torch.where(torch.arange(35)[:, None] % 2 == 0, -128, 127).expand(35, in_).to(torch.int8).contiguous()
    scheme = type(weight.scheme)("int", 8, "channel", layout="int-quantized")
    weight = type(weight)(scheme, (35, in_), numbers, torch.ones(35, 1))
    linear = NativeLinear(weight, None)
    x = torch.full((rows, in_), -128.0).bfloat16()
    x[::2, ::3] = 127.0
    made = torch.full((rows, 35), torch.nan)
    # By an input scale of 1, x is what is multiplied.
    mode = native.Activations.int8_row
    native.linear(linear.packed, mode, 1.0, x.data_ptr(), rows, in_, made.data_ptr(), 35, True)
    assert torch.equal(made, (x.double() @ numbers.double().T).float())


# CPUID's words of a Sapphire Rapids and its XCR0, by what each bit says.
FMA_OSXSAVE_F16C = 1 << 12 | 1 << 27 | 1 << 29
AVX2, AVX512 = 1 << 5, 1 << 16 | 1 << 17 | 1 << 30 | 1 << 31
VBMI_VNNI = 1 << 1 | 1 << 11
AMX_BF16, AMX_TILE, AMX_INT8 = 1 << 22, 1 << 24, 1 << 25
AVX512_BF16 = 1 << 5
YMM, ZMM, TILECFG, TILEDATA = 0x7, 0xE0, 1 << 17, 1 << 18
SAPPHIRE_RAPIDS = {
    "leaf_1_ecx": FMA_OSXSAVE_F16C,
    "leaf_7_ebx": AVX2 | AVX512,
    "leaf_7_ecx": VBMI_VNNI,
    "leaf_7_edx": AMX_BF16 | AMX_TILE | AMX_INT8,
    "leaf_7_1_eax": AVX512_BF16,
    "xcr0": YMM | ZMM | TILECFG | TILEDATA,
    "may_use_tiles": True,
}


@pytest.mark.parametrize(
    ("name", "lacks", "expected"),
    [
        ("may_use_tiles", True, "avx512_bf16"),  # Linux refused
        ("xcr0", TILEDATA, "avx512_bf16"),
        ("xcr0", TILECFG, "avx512_bf16"),
        ("leaf_7_edx", AMX_TILE, "avx512_bf16"),
        ("leaf_7_edx", AMX_INT8, "avx512_bf16"),
        ("leaf_7_edx", AMX_BF16, "avx512_bf16"),
        ("leaf_7_1_eax", AVX512_BF16, "avx512_vnni"),
        ("leaf_7_ecx", 1 << 1, "avx512_vnni"),
        ("leaf_7_ecx", 1 << 11, "avx2"),
        ("xcr0", 1 << 6, "avx2"),
        ("xcr0", 1 << 2, "none"),
        ("leaf_1_ecx", 1 << 12, "none"),
        ("leaf_7_ebx", AVX2, "none"),
    ],
)
def test_what_is_missing_decides_the_instruction_set(name, lacks, expected):
    assert native.isa_of(**SAPPHIRE_RAPIDS) == "amx"
    facts = SAPPHIRE_RAPIDS | {name: SAPPHIRE_RAPIDS[name] & ~lacks if name != "may_use_tiles" else False}
    assert native.isa_of(**facts) == expected


def test_emulated_tiles_are_never_the_machines_own():
    assert native.native_isa() != "amx_emulated"
    assert native.isas()[-1] == "amx_emulated"
    # The system may still refuse them, or the compiler not have known them.
    assert "amx" not in native.isas() or {"amx_tile", "amx_int8", "amx_bf16"} <= cpu_flags()


@pytest.mark.parametrize("kind", ["bf16", "int4", "int8"])
def test_few_rows_are_the_same_by_any_number_of_threads(emulated_tiles, kind):
    """How many blocks a tile of rows goes through at once depends on them: 4, 2 or 1 of these 20."""
    if kind == "bf16":
        weight = torch.randn(309, 672, generator=torch.Generator().manual_seed(1)).bfloat16()
    else:
        weight = make("int", int(kind[3:]), "group", 309, 672, 1, zero="int", group_size=48)
    linear = NativeLinear(weight, None)
    x = torch.randn(50, 672, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole, before = linear(x), native.num_threads()
    rounding = NativeLinear(weight, None, int8_activations=True) if kind != "bf16" else linear
    whole_rounded = rounding(x)
    try:
        for threads in (1, 4, 7):
            native.set_num_threads(threads)
            for rows in (1, 5, 16):
                assert torch.equal(linear(x[:rows]), whole[:rows]), (threads, rows)
                assert torch.equal(rounding(x[:rows]), whole_rounded[:rows]), (threads, rows)
    finally:
        native.set_num_threads(before)


def test_tiles_are_checked_against_vectors_before_they_are_used(emulated_tiles):
    assert tile_check.differing("amx_emulated", "avx2") is None
    assert native.isa() == "amx_emulated"


@pytest.mark.parametrize("wrong", ["bf16", "int3", "int3 × int8", "int4", "int4 × int8", "int8", "int8 × int8"])
@pytest.mark.parametrize("error", [1.1, math.nan])
def test_tiles_that_multiply_wrongly_are_not_used(monkeypatch, wrong, error):
    class Mistaken(NativeLinear):
        def __call__(self, x, dtype=torch.bfloat16):
            y = super().__call__(x, dtype)
            if self.kernel == f"native {wrong}, amx":
                y[-1, -1] = error * y.abs().max()
            return y

    chosen = ["amx"]
    monkeypatch.setattr(tile_check, "NativeLinear", Mistaken)
    monkeypatch.setattr(native, "isa", lambda: chosen[-1])
    monkeypatch.setattr(native, "force_isa", chosen.append)
    tile_check.settle_tiles.cache_clear()
    assert tile_check.settle_tiles() == f"native {wrong}, amx"
    assert chosen[-1] == "avx512_bf16"
    tile_check.settle_tiles.cache_clear()
    wrong = "nothing"
    chosen.append("amx")
    assert tile_check.settle_tiles() is None
    assert chosen[-1] == "amx"
    tile_check.settle_tiles.cache_clear()
