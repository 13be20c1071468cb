"""Tiles of AMX beside vectors, once before a process uses them: no machine that has tiles has run llmq's tests."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from llmq.quantize.formats.packing import pack_unsigned
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import ActivationScheme, WeightScheme
from llmq.runtime.kernels import native
from llmq.runtime.layers.native_linear import NativeLinear

OUT, IN = 48, 192
NUM_ROWS = 37  # whole tiles of 16, and a part of one
# Of the largest output: bf16 holds 8 bits, and sums differ in their order.
TOLERANCE = 2**-6


@cache
def settle_tiles() -> str | None:
    """Have vectors multiply from now on where tiles come to other numbers. Returned: of what they do; None where they
    are right, or there are none."""
    if native is None or native.isa() != "amx":
        return None
    wrong = differing("amx", "avx512_bf16")
    if wrong is not None:
        native.force_isa("avx512_bf16")
    return wrong


def differing(isa: str, trusted: str) -> str | None:
    """What one instruction set's linears multiply to other numbers than those of another. Leaves `isa` in use."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_ROWS, IN, generator=draw).bfloat16()
    for weight, int8_activations in _weights(draw):
        found = []
        for name in (trusted, isa):
            native.force_isa(name)
            linear = NativeLinear(weight, None, int8_activations)
            found.append(linear(x, torch.float32))
        expected, y = found
        if not (y - expected).abs().max() <= TOLERANCE * expected.abs().max():  # nor where one is NaN
            return linear.kernel
    return None


def _weights(draw: torch.Generator) -> Iterator[tuple[Tensor | QuantizedWeight, bool]]:
    """With whether their input is rounded to int8 beside."""
    yield torch.randn(OUT, IN, generator=draw).bfloat16(), False
    for bits in (3, 4):
        numbers = torch.randint(0, 1 << bits, (OUT, IN), generator=draw)
        scale = torch.rand(OUT, IN // 64, generator=draw).bfloat16()
        scheme = WeightScheme("int", bits, "group", 64)
        weight = QuantizedWeight(scheme, (OUT, IN), pack_unsigned(numbers, bits), scale)
        yield from ((weight, False), (weight, True))
    numbers, scale = torch.randint(0, 256, (OUT, IN), generator=draw), torch.rand(OUT, 1, generator=draw)
    for activation in (None, ActivationScheme("int")):
        scheme = WeightScheme("int", 8, "channel", activation=activation)
        yield QuantizedWeight(scheme, (OUT, IN), pack_unsigned(numbers, 8), scale), False
