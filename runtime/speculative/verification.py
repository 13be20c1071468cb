"""Which drafts a request keeps: those that it would have sampled.

A token is a function of its request's parameters, the tokens before it, and noise keyed by (seed, position)
(`sampling/noise.py`). So the rows behind drafts are sampled as they would be without any, and a draft is accepted
where the token of its position is the same; the first other one is the recovered token, and one after the last
draft a bonus. What comes out is what plain decoding gives, token by token, for every temperature, truncation, penalty,
bias and grammar: no ratio of two distributions is involved.

For a draft that is certain of its token this accepts as often as the rejection sampling of Leviathan et al. (2023,
arXiv 2211.17192), with the target's probability of it. A drafter that samples by the same noise meets the target as
often as two Gumbel-coupled distributions do, at least (1 - d) / (1 + d) of the time where d is their total variation
distance, against 1 - d at best (Daliri, Musco and Suresh 2024, arXiv 2408.07978).
"""

from collections.abc import Callable, Sequence

import torch

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.scheduler_output import RequestResult

# (logits [num_rows, vocab_size], whose rows) -> a token for each
Sample = Callable[[torch.Tensor, Sequence[RunnerRequest]], list[RequestResult]]


def sample_with_drafts(
    sample: Sample, logits: torch.Tensor, rows: Sequence[RunnerRequest], guesses: Sequence[int | None]
) -> list[RequestResult]:
    """One result for each sequence, with the drafts that it keeps and the token after them.

    logits: float32 [num_rows, vocab_size]. rows: the request as it stands at each row. guesses: the draft of the token
    that a row samples, upon which the next row stands; None ends a sequence.
    """
    if all(guess is None for guess in guesses):
        return sample(logits, rows)
    made = _sample_rows(sample, logits, rows, guesses)
    results, begin = [], 0
    for end, guess in enumerate(guesses, 1):
        if guess is None:
            results.append(_kept(made[begin:end], guesses[begin:end]))
            begin = end
    return results


def _sample_rows(
    sample: Sample, logits: torch.Tensor, rows: Sequence[RunnerRequest], guesses: Sequence[int | None]
) -> list[RequestResult | None]:
    """A grammar follows what was written and does not go back: its rows are sampled one after the other, each when the
    draft before it is accepted. None: never."""
    made: list[RequestResult | None] = [None] * len(rows)
    follows = [False, *(guess is not None for guess in guesses[:-1])]
    ready = [row for row, request in enumerate(rows) if request.params.grammar is None or not follows[row]]
    while ready:
        part = logits if len(ready) == len(rows) else logits[torch.tensor(ready, device=logits.device)]
        accepted = []
        for row, result in zip(ready, sample(part, [rows[row] for row in ready]), strict=True):
            made[row] = result
            if rows[row].params.grammar is not None and result.token_ids == [guesses[row]]:
                rows[row + 1].grammar_state = rows[row].grammar_state
                accepted.append(row + 1)
        ready = accepted
    return made


def _kept(made: Sequence[RequestResult | None], guesses: Sequence[int | None]) -> RequestResult:
    """What a sequence's rows come to. An error behind a draft comes again when its row is the next to be sampled."""
    if made[0].error is not None:
        return made[0]
    token_ids, logprobs = [], []
    for result, guess in zip(made, guesses, strict=True):
        if result is None or result.error is not None:
            break
        token_ids += result.token_ids
        logprobs += result.logprobs
        if result.token_ids != [guess]:
            break
    return RequestResult(token_ids=token_ids, logprobs=logprobs)
