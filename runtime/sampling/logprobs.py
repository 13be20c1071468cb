"""Log probabilities of given tokens, with their rank and the most likely alternatives."""

from collections.abc import Sequence

import torch

from llmq.runtime.request import TokenLogprobs
from llmq.runtime.staging import Fetched

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
    return LaunchedLogprobs(log_probs, torch.tensor(token_ids, device=log_probs.device), num_top).read()


class LaunchedLogprobs:
    """`token_logprobs` of tokens that are where the log probabilities are, [num_rows]: on their way to the host."""

    def __init__(self, log_probs: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> None:
        # A row that has failed may have drawn anything.
        token_ids = token_ids.clamp(0, log_probs.shape[1] - 1)[:, None]
        values = log_probs.gather(1, token_ids)
        ranks = (log_probs > values).sum(dim=1, keepdim=True) + 1
        columns = [token_ids, ranks, values]
        if num_top:
            top_values, top_ids = torch.topk(log_probs, num_top, dim=-1)
            columns += [top_ids, top_values]
        self._num_top = num_top
        # Exact in float64, whole numbers too: all in one copy.
        self._rows = Fetched(torch.cat([column.double() for column in columns], dim=1))

    def read(self) -> list[TokenLogprobs]:
        entries = []
        for token_id, rank, value, *top in self._rows.read().tolist():
            top_ids, top_values = map(int, top[: self._num_top]), top[self._num_top :]
            alternatives = list(zip(top_ids, top_values, strict=True))
            entries.append(TokenLogprobs(token_id=int(token_id), logprob=value, rank=int(rank), top=alternatives))
        return entries
