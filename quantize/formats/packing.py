"""Numbers of a few bits, and floats of 8 and 4 bits: to bytes and back, exactly."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmq.quantize.formats.scheme import FormatError


def pack_int32(q: Tensor, bits: int) -> Tensor:
    """int8 [rows, n] in [-2**(bits-1), 2**(bits-1)) -> int32 [rows, ceil(n * bits / 32)], bits 2 to 8.

    A row is one little-endian stream: number i, stored as q + 2**(bits-1), takes the bits from i * bits up, across
    words where 32 is no multiple of `bits`; unused bits are zero. So 32 numbers take `bits` words, as in
    compressed-tensors 0.19 and in GPTQ.
    """
    return pack_unsigned(q.to(torch.int16) + (1 << (bits - 1)), bits)


def unpack_int32(packed: Tensor, bits: int, n: int) -> Tensor:
    """int32 [rows, words] -> int8 [rows, n]; the inverse of `pack_int32`."""
    return unpack_unsigned(packed, bits, n).view(torch.int8).sub_(1 << (bits - 1))


def pack_unsigned(numbers: Tensor, bits: int) -> Tensor:
    """Whole numbers in [0, 2**bits), [rows, n] -> int32 [rows, ceil(n * bits / 32)]: `pack_int32`, no offset added."""
    _check_bits(bits)
    rows, n = numbers.shape
    eights = pad(numbers.to(torch.int16), (0, -n % 8)).view(rows, -1, 8)
    stored = torch.zeros(rows, eights.shape[1], bits + 1, dtype=torch.int16, device=numbers.device)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        moved = eights[:, :, place] << shift
        stored[:, :, byte] |= moved & 0xFF
        stored[:, :, byte + 1] |= moved >> 8
    stream = stored[:, :, :bits].to(torch.uint8).reshape(rows, -1)
    num_bytes = -(-n * bits // 32) * 4
    stream = pad(stream, (0, max(0, num_bytes - stream.shape[1])))[:, :num_bytes]
    # Flat first: a row alone keeps the stride that it was cut from.
    return stream.reshape(-1).view(torch.int32).view(rows, -1)


def unpack_unsigned(packed: Tensor, bits: int, n: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, n] in [0, 2**bits); the inverse of `pack_unsigned`."""
    _check_bits(bits)
    # A little-endian word's bytes hold the same order, and byte-wide shifts are what vectorizes.
    rows, mask = packed.shape[0], (1 << bits) - 1
    flat = packed.reshape(-1)
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    stored = flat.view(torch.uint8).view(rows, -1)
    if 8 % bits == 0:
        numbers = torch.empty(*stored.shape, 8 // bits, dtype=torch.uint8, device=packed.device)
        for place in range(8 // bits):
            numbers[:, :, place] = (stored >> (bits * place)) & mask
        return numbers.view(rows, -1)[:, :n]
    num_bytes = -(-n // 8) * bits
    stored = pad(stored, (0, max(0, num_bytes - stored.shape[1])))[:, :num_bytes].reshape(rows, -1, bits)
    numbers = torch.empty(*stored.shape[:2], 8, dtype=torch.uint8, device=packed.device)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        number = stored[:, :, byte] >> shift
        if shift + bits > 8:
            number = number | (stored[:, :, byte + 1] << (8 - shift))
        numbers[:, :, place] = number & mask
    return numbers.view(rows, -1)[:, :n]


def e4m3_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn -> `dtype`, exactly. torch's own CPU conversion goes number by number and is 20 times slower.

    e4m3's exponent and mantissa, moved under bf16's exponent field, are the same number times 2**-120 (the biases are
    7 and 127), subnormals included.
    """
    if values.device.type != "cpu":
        return values.to(dtype)
    codes = values.view(torch.int8)
    # The sign, extended, is in all bits above; the mask leaves the highest one.
    moved = codes.to(torch.int16).bitwise_left_shift_(4).bitwise_and_(0x7F0 - 0x8000)
    numbers = moved.view(torch.bfloat16).mul_(2.0**120)
    # e4m3fn has one NaN a sign, all exponent and mantissa bits set, which came out as 480.
    if codes.numel() and (int(codes.amax()) == 0x7F or int(values.view(torch.uint8).amax()) == 0xFF):
        numbers.masked_fill_(numbers.abs() == 480, float("nan"))
    return numbers.to(dtype)


def e2m1_to(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 codes 0 to 15 (sign, two bits of exponent, one of mantissa; OCP MX) -> ±0, 0.5, 1, 1.5, 2, 3, 4 or 6.

    As in `e4m3_to`, the biases being 1 and 127.
    """
    bits = codes.to(torch.int16)
    moved = ((bits & 0x7) << 6) | ((bits & 0x8) << 12)
    return (moved.view(torch.bfloat16) * 2.0**126).to(dtype)


def to_e2m1(x: Tensor) -> Tensor:
    """Floats -> uint8 codes 0 to 15 of the nearest e2m1 number, ties to the even code; beyond 6 saturates."""
    # Between the numbers; a tie goes up where the upper one has an even code.
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
    size = x.abs().float().contiguous()
    lower, upper = torch.bucketize(size, halfway), torch.bucketize(size, halfway, right=True)
    code = torch.where(lower % 2 == 0, lower, upper)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def _check_bits(bits: int) -> None:
    if not 2 <= bits <= 8:
        raise FormatError(f"{bits}-bit packed weights are not supported: 2 to 8 are")
