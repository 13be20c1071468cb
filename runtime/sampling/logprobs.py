"""Log probabilities of given tokens, with their rank and the most likely alternatives."""

from collections.abc import Sequence

import torch

from llmq.runtime.request import TokenLogprobs

# Several passes go over the logits that are scored. On a CPU a slice of them stays in the cache between the passes, and
# no temporary is so large that the allocator maps it anew each time: for each thread 8 rows of 49,152 words.
CACHED_BYTES = 3 * 2**19


def score_tokens(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """`token_logprobs` of the distributions of `logits`, float32 [num_rows, vocab_size]."""
    step = len(logits)
    if logits.device.type == "cpu":
        step = max(1, torch.get_num_threads() * CACHED_BYTES // (logits.shape[1] * logits.itemsize))
    entries: list[TokenLogprobs] = []
    for start in range(0, len(logits), step):
        log_probs = torch.log_softmax(logits[start : start + step], dim=-1)
        entries += token_logprobs(log_probs, token_ids[start : start + step], num_top)
    return entries


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
