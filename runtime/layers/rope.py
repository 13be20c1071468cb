"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and the ways its frequencies are stretched."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmq.profiles.errors import InputError


@dataclass(frozen=True)
class RopeParameters:
    """`rope_type` and its numbers, under config.json's own names."""

    theta: float
    rope_type: str
    values: dict[str, Any]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "RopeParameters":
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`. Refuses unknown types by name."""
        values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope_type = values.get("rope_type") or values.get("type") or "default"
        if rope_type not in _INVERSE_FREQUENCIES:
            raise InputError(
                f"config.json: rope type {rope_type!r} is not supported ({', '.join(_INVERSE_FREQUENCIES)} are)"
            )
        theta = values.get("rope_theta") or config.get("rope_theta") or 10000.0
        values.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        values.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
        return cls(float(theta), rope_type, values)


class RotaryEmbedding:
    """cos and sin of every position, computed once in float32."""

    def __init__(self, parameters: RopeParameters, head_dim: int, max_positions: int, device: torch.device) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, attention_factor = _INVERSE_FREQUENCIES[parameters.rope_type](
            1.0 / parameters.theta**exponent, parameters, head_dim
        )
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        # [max_positions, 1, head_dim / 2], to broadcast over heads
        self._cos = (angles.cos() * attention_factor)[:, None].to(device)
        self._sin = (angles.sin() * attention_factor)[:, None].to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each position, [num_tokens, 1, head_dim / 2]: gathered once a step for all layers."""
        return self._cos[positions], self._sin[positions]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of x [num_tokens, num_heads, head_dim], in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _default(frequencies: Tensor, parameters: RopeParameters, head_dim: int) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, parameters: RopeParameters, head_dim: int) -> tuple[Tensor, float]:
    return frequencies / parameters.values["factor"], 1.0


def _llama3(frequencies: Tensor, parameters: RopeParameters, head_dim: int) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    values = parameters.values
    factor, original = values["factor"], values["original_max_position_embeddings"]
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies, 1.0


def _yarn(frequencies: Tensor, parameters: RopeParameters, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): interpolate by parts, and scale the attention."""
    values = parameters.values
    factor, original = values["factor"], values["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """The frequency index that turns `rotations` times over the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(parameters.theta))

    low, high = dimension(values.get("beta_fast") or 32), dimension(values.get("beta_slow") or 1)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    attention_factor = values.get("attention_factor") or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return frequencies / factor * ramp + frequencies * (1 - ramp), attention_factor


_INVERSE_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
