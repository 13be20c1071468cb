"""Tokens drawn where the logits are: one kernel for all rows of a step, and one copy of a number a row."""

from collections.abc import Sequence

import torch

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.kernels.triton.sampling import sample

_MASK = (1 << 64) - 1


def draw_on_device(
    logits: torch.Tensor, requests: Sequence[RunnerRequest], errors: dict[int, str]
) -> tuple[list[int], list[float]]:
    """A token of each row of float32 logits [num_rows, vocab_size], and its highest logit: what `sampler.draw` draws,
    and the likeliest token where a request's temperature is 0. Nothing is added to `errors`."""
    params = [request.params for request in requests]
    device = logits.device
    floats = torch.tensor([(p.temperature, p.top_p, p.min_p) for p in params], dtype=torch.float64).to(device)
    words = [(p.top_k, _signed(p.seed or 0), len(r.token_ids)) for p, r in zip(params, requests, strict=True)]
    integers = torch.tensor(words, dtype=torch.int64).to(device)
    token_ids = torch.empty(len(requests), dtype=torch.int64, device=device)
    highest = torch.empty(len(requests), dtype=torch.float32, device=device)
    sample(
        logits if logits.stride(1) == 1 else logits.contiguous(),
        temperatures=floats[:, 0].float(),
        top_ks=integers[:, 0].to(torch.int32),
        top_ps=floats[:, 1].contiguous(),
        min_ps=floats[:, 2].float(),
        seeds=integers[:, 1].contiguous(),
        positions=integers[:, 2].contiguous(),
        token_ids=token_ids,
        highest=highest,
    ).run()
    # Exact in float64, as every token id is: both in one copy.
    made = torch.stack((token_ids.double(), highest.double())).tolist()
    return [int(token_id) for token_id in made[0]], made[1]


def _signed(seed: int) -> int:
    """The same 64 bits as an int64."""
    seed &= _MASK
    return seed - (1 << 64) if seed >> 63 else seed
