"""x Wᵀ + b, for numbers of rows that change at every step."""

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [num_rows, in_features] -> [num_rows, out_features].

    In 16 bits on a CPU oneDNN compiles a kernel for each number of rows that it meets and keeps the last 1,024 of all
    weights: 0.6 MB and 0.9 ms each, so that a server would grow by hundreds of megabytes and be slow until it has met
    them all. Rows are padded to one of few numbers instead.
    """
    num_rows = x.shape[0]
    padding = padded_rows(num_rows) - num_rows if x.device.type == "cpu" and x.dtype != torch.float32 else 0
    if not padding:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, padding)), weight, bias)[:num_rows]


def padded_rows(num_rows: int) -> int:
    """The next of four numbers between each power of two and the next: at most a quarter more."""
    step = 1 << max(0, (num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step
