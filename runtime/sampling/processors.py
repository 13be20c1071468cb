"""LogitsProcessors: what changes a row of logits before a token is chosen, in this order.

Each is a function of one row (float32 [vocab_size], changed in place), the request's parameters, and its tokens so far,
so that nothing is remembered between steps and a row never sees its neighbours.
"""

from collections.abc import Callable, Collection, Sequence

import torch

from llmq.runtime.sampling_params import SamplingParams

# (row, params, token_ids, num_prompt_tokens, eos_token_ids)
LogitsProcessor = Callable[[torch.Tensor, SamplingParams, Sequence[int], int, Collection[int]], None]


def apply_logit_bias(row, params, token_ids, num_prompt_tokens, eos_token_ids) -> None:
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)


def apply_min_tokens(row, params, token_ids, num_prompt_tokens, eos_token_ids) -> None:
    """No end token before `min_tokens` tokens were generated."""
    if len(token_ids) - num_prompt_tokens < params.min_tokens:
        ends = set(params.stop_token_ids) if params.ignore_eos else {*params.stop_token_ids, *eos_token_ids}
        if ends:
            row[torch.tensor(sorted(ends), device=row.device)] = -torch.inf


def apply_penalties(row, params, token_ids, num_prompt_tokens, eos_token_ids) -> None:
    """Repetition (Keskar et al. 2019, arXiv 1909.05858: over prompt and output, divides positive logits and multiplies
    negative ones), presence and frequency (OpenAI: over the output, subtracted once and per occurrence)."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(token_ids, device=row.device).unique()
        logits = row[seen]
        row[seen] = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(token_ids[num_prompt_tokens:], dtype=torch.int64, device=row.device)
        ids, counts = output.unique(return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)


PROCESSORS: tuple[LogitsProcessor, ...] = (apply_logit_bias, apply_min_tokens, apply_penalties)


def changes_logits(params: SamplingParams) -> bool:
    """Whether a processor may change a row of such a request: of most requests none does."""
    are_added = params.logit_bias or params.min_tokens or params.presence_penalty or params.frequency_penalty
    return bool(are_added) or params.repetition_penalty != 1.0
