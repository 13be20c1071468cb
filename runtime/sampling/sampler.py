"""Sampler: rows of logits -> one token each."""

from collections.abc import Collection, Sequence

import torch

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.sampling.logprobs import token_logprobs
from llmq.runtime.sampling.noise import exponentials
from llmq.runtime.sampling.processors import PROCESSORS
from llmq.runtime.scheduler_output import RequestResult

# top_p and min_p look at this many candidates first; a row whose mass lies wider is sorted whole.
NUM_CANDIDATES = 1024


class Sampler:
    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)

    def __call__(self, logits: torch.Tensor, requests: Sequence[RunnerRequest]) -> list[RequestResult]:
        """Choose a token for each row of float32 logits [num_rows, vocab_size]. Rows do not influence each other."""
        scored = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        log_probs = {row: torch.log_softmax(logits[row], dim=-1) for row in scored}
        for row, request in enumerate(requests):
            for process in PROCESSORS:
                process(logits[row], request.params, request.token_ids, request.num_prompt_tokens, self.eos_token_ids)
        token_ids = torch.argmax(logits, dim=-1).tolist()
        random = [row for row, request in enumerate(requests) if request.params.temperature > 0]
        if random:
            sampled = sample(logits[random], [requests[row] for row in random])
            for row, token_id in zip(random, sampled, strict=True):
                token_ids[row] = token_id
        results = []
        for row, (request, token_id) in enumerate(zip(requests, token_ids, strict=True)):
            logprobs = []
            if row in log_probs:
                logprobs = token_logprobs(log_probs[row][None], [token_id], request.params.logprobs)
            results.append(RequestResult(token_ids=[token_id], logprobs=logprobs))
        return results


def sample(logits: torch.Tensor, requests: Sequence[RunnerRequest]) -> list[int]:
    """Draw from each row's distribution after temperature, top-k, top-p and min-p.

    The token with the largest p / e is drawn, e ~ Exp(1) for each token (the Gumbel-max trick): exact, and unlike the
    inversion of a cumulative sum, whose every border can fall between two roundings, it changes with the last bits of
    the logits only where two tokens tie. The noise is keyed by (seed, position, token), so that a seeded request draws
    the same token alone and in a batch, before and after a preemption.
    """
    temperatures = torch.tensor([request.params.temperature for request in requests], device=logits.device)
    probs = torch.softmax(logits / temperatures[:, None], dim=-1, dtype=torch.float32)
    chosen = []
    width = min(probs.shape[1], max(NUM_CANDIDATES, *(request.params.top_k for request in requests)))
    for row, request in zip(probs, requests, strict=True):
        params = request.params
        if not _truncates(request):
            candidates, ids = row, torch.arange(len(row), device=row.device)
        else:
            head, ids = torch.topk(row, width)
            candidates = truncate(head, params.top_k, params.top_p, params.min_p)
            if candidates is None:
                ordered, ids = torch.sort(row, descending=True, stable=True)
                candidates = truncate(ordered, params.top_k, params.top_p, params.min_p)
            ids = ids[: len(candidates)]
        noise = exponentials(params.seed, len(request.token_ids), ids.cpu().numpy())
        best = torch.argmax(candidates.double() / torch.from_numpy(noise).to(candidates.device))
        chosen.append(int(ids[best]))
    return chosen


def truncate(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor | None:
    """The leading part of `probs` (descending, of one row) that survives, not renormalized.

    top-k first; top-p is the smallest head of those whose share reaches top_p; min-p (Nguyen et al. 2024, arXiv
    2407.01082) drops what is under min_p times the most likely. None where `probs` is a head too short to tell.
    """
    is_whole = abs(float(probs.sum()) - 1.0) < 1e-5
    if top_k:
        probs, is_whole = probs[:top_k], True
    total = float(probs.sum()) if top_k else 1.0
    keep = len(probs)
    if top_p < 1.0:
        reached = torch.cumsum(probs, dim=0, dtype=torch.float64) >= top_p * total
        if not bool(reached[-1]):
            if not is_whole:
                return None
        else:
            keep = int(torch.argmax(reached.to(torch.int8))) + 1
            is_whole = True
    if min_p > 0.0:
        above = int((probs >= min_p * probs[0]).sum())
        if above == len(probs) and not is_whole:
            return None
        keep, is_whole = min(keep, above), True
    return probs[: max(1, keep)] if is_whole else None


def _truncates(request: RunnerRequest) -> bool:
    params = request.params
    return bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0
