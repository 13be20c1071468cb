"""Sampler: rows of logits -> one token each."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.faults import isolated
from llmq.runtime.sampling.draws import Drawn, Draws, HostDraws
from llmq.runtime.sampling.grammar_mask import GrammarMask
from llmq.runtime.sampling.logprobs import LaunchedLogprobs
from llmq.runtime.sampling.noise import exponentials
from llmq.runtime.sampling.processors import PROCESSORS, changes_logits
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import RequestResult

# top_p and min_p look at this many candidates first; a row whose mass lies wider is sorted whole.
NUM_CANDIDATES = 1024

# (logits, requests, errors by row) -> token ids and highest logits, on the host or on their way to it
Choose = Callable[[torch.Tensor, Sequence[RunnerRequest], dict[int, str]], Drawn | Draws]

_NO_TOKEN = "no token is left to choose from: what the request asks for rules out all of them"
_NOT_FINITE = "the model's logits are not finite: its activations overflowed on this text"


class Sampler:
    def __init__(
        self,
        eos_token_ids: Collection[int],
        grammar_mask: GrammarMask | None = None,
        choose: Choose | None = None,
    ) -> None:
        """choose: what draws tokens in place of torch, all rows of a step at once."""
        self.eos_token_ids = frozenset(eos_token_ids)
        self._grammar_mask = grammar_mask
        self._choose = choose or choose_by_torch

    def __call__(self, logits: torch.Tensor, requests: Sequence[RunnerRequest]) -> list[RequestResult]:
        """Choose a token for each row of float32 logits [num_rows, vocab_size]. Rows do not influence each other: what
        fails for one becomes its `error`."""
        return self.launch(logits, requests).read()

    def launch(self, logits: torch.Tensor, requests: Sequence[RunnerRequest]) -> "LaunchedSample":
        """The same, without waiting for the device where tokens are drawn there."""
        errors: dict[int, str] = {}
        scored = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        log_probs = {row: torch.log_softmax(logits[row], dim=-1) for row in scored}
        bound = {row: request for row, request in enumerate(requests) if request.params.grammar is not None}
        if bound:
            self._grammar_mask.advance(bound, errors)
        for row, request in enumerate(requests):
            if row in errors or not (row in bound or changes_logits(request.params)):
                continue
            with isolated(errors, row):
                for process in PROCESSORS:
                    process(
                        logits[row], request.params, request.token_ids, request.num_prompt_tokens, self.eos_token_ids
                    )
                if row in bound:
                    self._grammar_mask(logits[row], request)
        draws = self._choose(logits, requests, errors)
        if isinstance(draws, Drawn):
            draws = HostDraws(draws, logits.device)
        if log_probs:
            token_ids = draws.token_ids
            logprobs = {
                row: LaunchedLogprobs(values[None], token_ids[row : row + 1], requests[row].params.logprobs)
                for row, values in log_probs.items()
            }
        else:
            logprobs = {}
        return LaunchedSample(draws, len(requests), logprobs, errors)

    def end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end a request."""
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self.eos_token_ids


@dataclass(frozen=True)
class LaunchedSample:
    """Tokens of rows that may still be on their way to the host."""

    draws: Draws
    num_rows: int
    logprobs: Mapping[int, LaunchedLogprobs]  # of the rows that ask for them
    errors: dict[int, str]  # by row

    def read(self) -> list[RequestResult]:
        token_ids, highest = self.draws.read()
        errors = dict(self.errors)
        for row, value in enumerate(highest):
            if not math.isfinite(value):
                errors[row] = errors.get(row, _NO_TOKEN if value == -math.inf else _NOT_FINITE)
        return [
            RequestResult(error=errors[row])
            if row in errors
            else RequestResult(
                token_ids=[token_ids[row]], logprobs=self.logprobs[row].read() if row in self.logprobs else []
            )
            for row in range(self.num_rows)
        ]


def choose_by_torch(logits: torch.Tensor, requests: Sequence[RunnerRequest], errors: dict[int, str]) -> Drawn:
    """A token of each row of processed logits, and its highest logit. A row in `errors`, or that comes to be in it,
    gets any token."""
    highest, likeliest = logits.max(dim=-1)
    token_ids, highest = likeliest.tolist(), highest.tolist()
    random = [
        row
        for row, request in enumerate(requests)
        if request.params.temperature > 0 and row not in errors and math.isfinite(highest[row])
    ]
    if random:
        probs = probabilities(logits[random], [requests[row] for row in random])
        for index, row in enumerate(random):
            with isolated(errors, row):
                token_ids[row] = draw(probs[index], requests[row])
    return Drawn(token_ids, highest)


def sample(logits: torch.Tensor, requests: Sequence[RunnerRequest]) -> list[int]:
    """Draw from each row's distribution after temperature, top-k, top-p and min-p."""
    return [draw(probs, request) for probs, request in zip(probabilities(logits, requests), requests, strict=True)]


def probabilities(logits: torch.Tensor, requests: Sequence[RunnerRequest]) -> torch.Tensor:
    """Each row's distribution at its own temperature, float32 [num_rows, vocab_size]."""
    temperatures = torch.tensor([request.params.temperature for request in requests], device=logits.device)
    return torch.softmax(over_temperatures(logits, temperatures), dim=-1, dtype=torch.float32)


def over_temperatures(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Logits [num_rows, vocab_size], each row over its own; at one by which the highest would be infinite, over the
    least by which it is not: all but the likeliest are as impossible there."""
    least = logits.amax(dim=-1).abs() / 1e38
    return logits / torch.where(least.isfinite(), torch.maximum(temperatures, least), temperatures)[:, None]


def draw(probs: torch.Tensor, request: RunnerRequest) -> int:
    """One token of a row [vocab_size], after top-k, top-p and min-p.

    The token with the largest p / e is drawn, e ~ Exp(1) for each token (the Gumbel-max trick): exact, and unlike the
    inversion of a cumulative sum, whose every border can fall between two roundings, it changes with the last bits of
    the logits only where two tokens tie. The noise is keyed by (seed, position, token), so that a seeded request draws
    the same token alone and in a batch, before and after a preemption.
    """
    params = request.params
    if not _truncates(request):
        candidates, ids = probs, torch.arange(len(probs), device=probs.device)
    else:
        head, ids = torch.topk(probs, min(len(probs), max(NUM_CANDIDATES, params.top_k)))
        candidates = truncate(head, params.top_k, params.top_p, params.min_p)
        if candidates is None:
            ordered, ids = torch.sort(probs, descending=True, stable=True)
            candidates = truncate(ordered, params.top_k, params.top_p, params.min_p)
        ids = ids[: len(candidates)]
    noise = exponentials(params.seed, len(request.token_ids), ids.cpu().numpy())
    return int(ids[torch.argmax(candidates.double() / torch.from_numpy(noise).to(candidates.device))])


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
