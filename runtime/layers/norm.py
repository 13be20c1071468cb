"""Norms: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), Gemma's kind of it, and LayerNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.num_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RMSNormPlusOne(RMSNorm):
    """Gemma's: scaled by 1 + weight, and rounded only once both are multiplied, in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(1.0 + weight.float(), eps)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.float()).to(x.dtype)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) · weight + bias, over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps
        self.num_bytes = weight.nbytes + bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


def softcap(x: Tensor, limit: float) -> Tensor:
    """limit · tanh(x / limit): never beyond ±limit, in place (Gemma 2, arXiv 2408.00118 section 2)."""
    return x.div_(limit).tanh_().mul_(limit)


def root_as_stored(hidden_size: int, dtype: torch.dtype) -> float:
    """sqrt(hidden_size) rounded to `dtype`: the factor that Gemma's embeddings were trained with."""
    return float(torch.tensor(hidden_size**0.5).to(dtype))
