"""What a quantized linear is, in words and numbers: no tensors, and no torch, so that a check costs no import."""

import math
from dataclasses import dataclass
from typing import Literal

_NUMBERS = {("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "fp4"}


class FormatError(Exception):
    """A checkpoint's layout that this package does not read, or that contradicts itself: says which, and where."""

    exit_code = 2


@dataclass(frozen=True)
class ActivationScheme:
    """How a linear's input is rounded before the product.

    dynamic: one scale a token, or one for each `group_size` channels of a token, computed from it; else one stored
    `input_scale` for all. With 4 bits (NVFP4) the scales of the groups are themselves e4m3, under the stored scale.
    """

    kind: Literal["int", "float"]
    bits: int = 8
    dynamic: bool = True
    group_size: int | None = None

    @property
    def name(self) -> str:
        extent = "per token" if self.dynamic else "per tensor"
        if self.group_size is not None:
            extent = f"per {self.group_size} channels"
        return f"{_NUMBERS[self.kind, self.bits]} {'dynamic' if self.dynamic else 'static'} {extent}"


@dataclass(frozen=True)
class KVCacheScheme:
    """What the checkpoint asks of the KV-cache. Static: `<attention module>.k_scale` and `.v_scale` are stored."""

    kind: str  # "int" or "float"
    bits: int
    strategy: str  # "tensor": one scale a layer for K and one for V; "attn_head": one a head
    dynamic: bool
    symmetric: bool


@dataclass(frozen=True)
class WeightScheme:
    """What a quantized linear is made of.

    kind and bits: int of 2 to 8 bits, float of 8 (e4m3) or 4 (e2m1).
    strategy: what shares a scale: the tensor, a row, `group_size` columns of a row, or a block of `block_rows` rows and
    `group_size` columns.
    layout: how the numbers lie in memory: packed into int32 words, one an int8, or one an e4m3.
    """

    kind: Literal["int", "float"]
    bits: int
    strategy: Literal["tensor", "channel", "group", "block"]
    group_size: int | None = None
    symmetric: bool = True
    activation: ActivationScheme | None = None
    layout: Literal["pack-quantized", "int-quantized", "float-quantized"] = "pack-quantized"
    has_column_groups: bool = False  # activation order: a stored group index for each input column
    has_offset: bool = False  # asymmetric by a float that is added, not by an integer zero point (GGUF)
    block_rows: int | None = None

    @property
    def name(self) -> str:
        """Short and for people: `int4 g64 asymmetric`, `fp8 per channel, activations fp8 dynamic per token`."""
        number = f"int{self.bits}" if self.kind == "int" else f"fp{self.bits}"
        extents = {"group": f"g{self.group_size}", "block": f"{self.block_rows}×{self.group_size}"}
        extent = extents.get(self.strategy, f"per {self.strategy}")
        sign = "" if self.kind == "float" else (" symmetric" if self.symmetric else " asymmetric")
        order = " in activation order" if self.has_column_groups else ""
        activation = "" if self.activation is None else f", activations {self.activation.name}"
        return f"{number} {extent}{sign}{order}{activation}"

    def num_groups(self, in_features: int) -> int:
        """Scales in a row of the weight."""
        return -(-in_features // self.group_size) if self.strategy in ("group", "block") else 1

    def column_step(self, in_features: int) -> int:
        """Columns may be cut at multiples of this: whole groups, and whole words of packed numbers."""
        group = self.group_size if self.num_groups(in_features) > 1 else 1
        return math.lcm(group, 32 // math.gcd(32, self.bits) if self.layout == "pack-quantized" else 1)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Of the scales of a [out, in] weight."""
        rows = {"tensor": 1, "block": -(-shape[0] // (self.block_rows or 1))}.get(self.strategy, shape[0])
        return rows, self.num_groups(shape[1])
