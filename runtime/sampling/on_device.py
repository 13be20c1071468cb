"""Tokens drawn where the logits are: one kernel for all rows of a step, and two numbers of a row to the host."""

from collections.abc import Sequence

import numpy as np
import torch

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.kernels.triton.sampling import sample
from llmq.runtime.sampling.draws import DeviceDraws
from llmq.runtime.staging import staging_of

_MASK = (1 << 64) - 1


class DrawOnDevice:
    """A token of each row of float32 logits [num_rows, vocab_size], and its highest logit: what `sampler.draw` draws,
    and the likeliest token where a request's temperature is 0. Nothing is added to `errors`."""

    def __init__(self, device: torch.device) -> None:
        self._staging = staging_of(device)

    def __call__(self, logits: torch.Tensor, requests: Sequence[RunnerRequest], errors: dict[int, str]) -> DeviceDraws:
        params = [request.params for request in requests]
        self._staging.begin_step()
        temperatures, top_ps, min_ps, top_ks, seeds, positions = self._staging.send(
            [
                np.array([one.temperature for one in params], dtype=np.float32),
                np.array([one.top_p for one in params], dtype=np.float64),
                np.array([one.min_p for one in params], dtype=np.float32),
                np.array([one.top_k for one in params], dtype=np.int32),
                np.array([_signed(one.seed or 0) for one in params], dtype=np.int64),
                np.array([len(request.token_ids) for request in requests], dtype=np.int64),
            ]
        )
        token_ids = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
        highest = torch.empty(len(requests), dtype=torch.float32, device=logits.device)
        sample(
            logits if logits.stride(1) == 1 else logits.contiguous(),
            temperatures=temperatures,
            top_ks=top_ks,
            top_ps=top_ps,
            min_ps=min_ps,
            seeds=seeds,
            positions=positions,
            token_ids=token_ids,
            highest=highest,
        ).run()
        return DeviceDraws(token_ids, highest)


def _signed(seed: int) -> int:
    """The same 64 bits as an int64."""
    seed &= _MASK
    return seed - (1 << 64) if seed >> 63 else seed
