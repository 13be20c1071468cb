"""The shape of a linear."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """Linears of one kind: their weight is [out_features, in_features], and there are `count` of them."""

    name: str
    out_features: int
    in_features: int
    count: int
    bias: bool = False
