"""Log probabilities of given tokens, with their rank and the most likely alternatives."""

from collections.abc import Sequence

import torch

from llmq.runtime.request import TokenLogprobs


def token_logprobs(log_probs: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """One entry a row of `log_probs` [num_rows, vocab_size], for the token given with it.

    rank 1 is the most likely token; tokens of equal probability share a rank.
    """
    chosen = torch.tensor(token_ids, device=log_probs.device)[:, None]
    values = log_probs.gather(1, chosen)
    ranks = ((log_probs > values).sum(dim=1) + 1).tolist()
    top: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if num_top:
        top_values, top_ids = torch.topk(log_probs, num_top, dim=-1)
        top = [list(zip(ids, row, strict=True)) for ids, row in zip(top_ids.tolist(), top_values.tolist(), strict=True)]
    return [
        TokenLogprobs(token_id=token_id, logprob=value, rank=rank, top=alternatives)
        for token_id, value, rank, alternatives in zip(token_ids, values[:, 0].tolist(), ranks, top, strict=True)
    ]
