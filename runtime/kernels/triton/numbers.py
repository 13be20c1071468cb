"""Conversions that every architecture and the interpreter make alike: by bits, in float32.

sm_80 has no conversion to or from e4m3, and the interpreter truncates float32 -> bf16.
"""

import triton
import triton.language as tl

_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2**23: added, it leaves a number rounded to a whole one, ties to even


@triton.jit
def e4m3_to_fp32(code):
    """uint8 codes of float8_e4m3fn -> float32, exactly: moved under fp16's exponent, which has 8 more to its bias."""
    wide = code.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def int8_to_fp32(q):
    """int8 -> float32, exactly, by integer operations: a conversion runs at a quarter of their rate."""
    bits = (q.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388736.0  # 2**23 + 128


@triton.jit
def fp32_to_e4m3(x):
    """float32 -> uint8 codes of float8_e4m3fn, ties to even, beyond ±448 saturated; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.uint32, bitcast=True)
    # Of 23 bits of mantissa 3 stay; the exponent's bias goes from 127 to 7.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Under 2**-6 the codes count multiples of 2**-9.
    small = (size * 512.0 + _ROUND).to(tl.uint32, bitcast=True) - 0x4B400000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def rounded(x):
    """The nearest whole number, ties to even, of |x| < 2**22."""
    return (x + _ROUND) - _ROUND


@triton.jit
def fp32_to_bf16_bits(x):
    """float32 -> the bits of the nearest bf16, ties to even, as int16. Not for NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def bf16_bits_to_fp32(bits):
    """int16 holding bf16's bits -> float32, exactly."""
    return (bits.to(tl.uint16).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def tanh(x):
    """tanh, to about 1e-7 of 1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
