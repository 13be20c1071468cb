"""What a quantized linear is, in words and numbers: no tensors, and no torch, so that a check costs no import."""

from dataclasses import dataclass
from typing import Literal


class FormatError(Exception):
    """A checkpoint's layout that this package does not read, or that contradicts itself: says which, and where."""

    exit_code = 2


@dataclass(frozen=True)
class ActivationScheme:
    """How a linear's input is rounded before the product: per token at run time, or with one stored `input_scale`."""

    kind: Literal["int", "float"]
    bits: int = 8
    dynamic: bool = True  # one scale a token, computed from it; False: one scale for all, calibrated

    @property
    def name(self) -> str:
        number = "int8" if self.kind == "int" else "fp8"
        return f"{number} {'dynamic per token' if self.dynamic else 'static per tensor'}"


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
    """What a quantized linear is made of. `layout` is the compressed-tensors name of its storage."""

    kind: Literal["int", "float"]
    bits: int
    strategy: Literal["tensor", "channel", "group"]
    group_size: int | None = None  # with strategy "group" only
    symmetric: bool = True
    activation: ActivationScheme | None = None
    layout: Literal["pack-quantized", "int-quantized", "float-quantized"] = "pack-quantized"
    has_column_groups: bool = False  # activation order: a stored group index for each input column

    @property
    def name(self) -> str:
        """Short and for people: `int4 g64 asymmetric`, `fp8 per channel, activations fp8 dynamic per token`."""
        number = f"int{self.bits}" if self.kind == "int" else "fp8"
        extent = f"g{self.group_size}" if self.strategy == "group" else f"per {self.strategy}"
        sign = "" if self.kind == "float" else (" symmetric" if self.symmetric else " asymmetric")
        activation = "" if self.activation is None else f", activations {self.activation.name}"
        return f"{number} {extent}{sign}{activation}"

    def num_groups(self, in_features: int) -> int:
        """Scales in a row of the weight."""
        return in_features // self.group_size if self.strategy == "group" else 1
