"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and the ways its frequencies are stretched."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmq.profiles.errors import InputError
from llmq.profiles.families import DecoderFamily, windows_of


@dataclass(frozen=True)
class RopeParameters:
    """`rope_type` and its numbers, under config.json's own names. Of each head the first `rotary_dim` rotate."""

    theta: float
    rope_type: str
    rotary_dim: int
    values: dict[str, Any]

    @classmethod
    def from_values(cls, values: dict[str, Any], config: dict[str, Any], theta: float) -> "RopeParameters":
        """`values`: a `rope_parameters` (transformers 5) or `rope_scaling`; `theta` where neither it nor the config
        gives a base. Refuses unknown types by name."""
        values = dict(values)
        rope_type = values.get("rope_type") or values.get("type") or "default"
        if rope_type == "su" or "long_factor" in values:
            rope_type = "longrope"  # Phi-3 called it "su", and "yarn", before it had a name
        if rope_type not in _INVERSE_FREQUENCIES:
            raise InputError(
                f"config.json: rope type {rope_type!r} is not supported ({', '.join(_INVERSE_FREQUENCIES)} are)"
            )
        context = config.get("max_position_embeddings")
        values.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings") or context)
        values.setdefault("max_position_embeddings", context)
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rotated = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        return cls(float(values.get("rope_theta") or theta), rope_type, int(head_dim * rotated), values)


def ropes_of(config: dict[str, Any], family: DecoderFamily, num_layers: int) -> list[RopeParameters | None]:
    """The rotation of each layer; None where a layer has none."""
    given = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or family.rope_theta
    if family.local_rope_theta is None:
        ropes: list[RopeParameters | None]
        ropes = [RopeParameters.from_values(given or config.get("rope_scaling") or {}, config, theta)] * num_layers
    else:
        # Two bases: layers with a window have their own, and only the others are stretched.
        whole = RopeParameters.from_values(
            given.get("full_attention") or config.get("rope_scaling") or {}, config, theta
        )
        local = RopeParameters.from_values(
            given.get("sliding_attention") or {}, config, family.local_rope_theta.of(config)
        )
        ropes = [whole if window is None else local for window in windows_of(config, num_layers)]
    if family.no_rope_every is not None:
        period = family.no_rope_every.of(config)
        rotates = config.get("no_rope_layers") or [(layer + 1) % period for layer in range(num_layers)]
        ropes = [rope if rotates[layer] else None for layer, rope in enumerate(ropes)]
    return ropes


class RotaryEmbedding:
    """cos and sin of every position, computed once in float32."""

    def __init__(self, parameters: RopeParameters, max_positions: int, device: torch.device) -> None:
        dim = parameters.rotary_dim
        self.name = parameters.rope_type
        if parameters.rope_type == "longrope":
            self.name += f", {_longrope_factors(parameters, max_positions).replace('_', ' ')}s"
        exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        frequencies, attention_factor = _INVERSE_FREQUENCIES[parameters.rope_type](
            1.0 / parameters.theta**exponent, parameters, max_positions
        )
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        # cos and sin, float32 [max_positions, 1, rotary_dim / 2] each, to broadcast over heads
        self.tables = tuple((made * attention_factor)[:, None].to(device) for made in (angles.cos(), angles.sin()))

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each position, [num_tokens, 1, rotary_dim / 2]: gathered once a step for all layers."""
        cos, sin = self.tables
        return cos[positions], sin[positions]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + rotary_dim / 2]) of x [num_tokens, num_heads, head_dim], in float32; what of a head
    lies behind rotary_dim stays as it is."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if x.shape[-1] == 2 * half else torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def _default(frequencies: Tensor, parameters: RopeParameters, max_positions: int) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, parameters: RopeParameters, max_positions: int) -> tuple[Tensor, float]:
    return frequencies / parameters.values["factor"], 1.0


def _llama3(frequencies: Tensor, parameters: RopeParameters, max_positions: int) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    values = parameters.values
    factor, original = values["factor"], values["original_max_position_embeddings"]
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies, 1.0


def _yarn(frequencies: Tensor, parameters: RopeParameters, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): interpolate by parts, and scale the attention."""
    values = parameters.values
    factor, original = values["factor"], values["original_max_position_embeddings"]
    head_dim = parameters.rotary_dim

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


def _longrope(frequencies: Tensor, parameters: RopeParameters, max_positions: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): each frequency divided by a factor that was searched for.

    There is a set of factors for the original context and one for longer texts. Which one holds is decided once, by the
    longest text that is served: keys rotated by the one mean nothing to queries rotated by the other, so that a switch
    within a sequence (as transformers' forward makes when it crosses the original context) would change what is cached.
    """
    values = parameters.values
    original = values["original_max_position_embeddings"]
    factors = values[_longrope_factors(parameters, max_positions)]
    stretch = values.get("factor") or values["max_position_embeddings"] / original
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return frequencies / torch.tensor(factors, dtype=torch.float32), attention_factor


def _longrope_factors(parameters: RopeParameters, max_positions: int) -> str:
    return "long_factor" if max_positions > parameters.values["original_max_position_embeddings"] else "short_factor"


_INVERSE_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
