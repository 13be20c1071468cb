"""The shape of a linear, and what is said where shapes are not known."""

from dataclasses import dataclass

from llmq.profiles.errors import InputError


class UnknownWeightsError(InputError):
    """How many bytes the weights take is not known from config.json alone."""


@dataclass(frozen=True)
class LinearShape:
    """Linears of one kind: their weight is [out_features, in_features], and there are `count` of them."""

    name: str
    out_features: int
    in_features: int
    count: int
    bias: bool = False
