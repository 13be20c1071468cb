"""The shape of a linear, and what is said where shapes are not known."""

from dataclasses import dataclass

from llmq.profiles.errors import InputError


class UnknownWeightsError(InputError):
    """How many bytes the weights take is not known from config.json alone."""


@dataclass(frozen=True)
class LinearShape:
    """Linears of one kind: their weight is [out_features, in_features], and there are `count` of them.

    is_expert: of routed experts, of which a token passes a few.
    """

    name: str
    out_features: int
    in_features: int
    count: int
    bias: bool = False
    is_expert: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer that has them, and how many a token is sent to."""

    count: int
    per_token: int
