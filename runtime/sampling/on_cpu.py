"""Tokens drawn by our own kernel for CPUs: no sort, and no thread of another library beside those of the step."""

from collections.abc import Sequence

import numpy as np
import torch

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.kernels import native
from llmq.runtime.sampling.draws import Drawn

_MASK = (1 << 64) - 1

# `Draw` of runtime/kernels/native/sample.h.
_DRAW = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.int64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("temperature", np.float32),
    ]
)


def draw_on_cpu(logits: torch.Tensor, requests: Sequence[RunnerRequest], errors: dict[int, str]) -> Drawn:
    """A token of each row of float32 logits [num_rows, vocab_size], and its highest logit: what `sampler.draw` draws,
    and the likeliest token where a request's temperature is 0. Nothing is added to `errors`."""
    draws = np.array([_draw(request) for request in requests], dtype=_DRAW)
    token_ids, highest = np.empty(len(draws), dtype=np.int64), np.empty(len(draws), dtype=np.float32)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    where = (array.ctypes.data for array in (draws, token_ids, highest))
    native.sample(logits.data_ptr(), *logits.shape, logits.stride(0), *where)
    return Drawn(token_ids.tolist(), highest.tolist())


def _draw(request: RunnerRequest) -> tuple[int, int, int, float, float, float]:
    params = request.params
    seed = (params.seed or 0) & _MASK
    return seed, len(request.token_ids), params.top_k, params.top_p, params.min_p, params.temperature
