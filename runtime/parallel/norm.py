"""RMSNorm over features that ranks share."""

import torch
from torch import Tensor

from llmq.runtime.parallel.collectives import Collectives


class SplitRMSNorm:
    """x / sqrt(mean(x²) + eps) · weight, the mean over all ranks' features, which are equally many on each (a feature
    that several hold counts several times, which leaves the mean as it is)."""

    def __init__(self, weight: Tensor, eps: float, collectives: Collectives) -> None:
        self.weight, self.eps, self.collectives = weight, eps, collectives
        self.num_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = self.collectives.all_reduce(wide.square().mean(dim=-1, keepdim=True)) / self.collectives.num_ranks
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight
