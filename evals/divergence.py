"""How far a candidate's next-token distributions are from a baseline's: KL divergence and top-1 agreement, streamed.

Two engines compute the same windows in lockstep and hand over their logits chunk by chunk; a chunk is reduced to a few
numbers a position and forgotten, so that nothing larger than one step's logits of each engine is ever held. Both
perplexities fall out of the same logits.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmq.evals.perplexity import Perplexity, TextCounts, check_window_fits, scoring_requests, summarize
from llmq.evals.stepping import EngineLike
from llmq.evals.windows import WindowPlan
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.progress import Progress, silent
from llmq.runtime.request import EngineRequest

DEFINITIONS = {
    "mean_kl": "mean over positions of KL(baseline‖candidate) = Σ p_base (ln p_base - ln p_cand), in nats; 0: same",
    "p99_kl": "99 of 100 positions diverge less than this",
    "max_kl": "the worst position",
    "top1_agreement": "share of positions where both would pick the same next token greedily",
}

_ROWS_AT_ONCE = 32  # 32 x 49152 float32 is 6 MiB: the passes over one slice stay in the cache

ObserveLogits = Callable[[str, int, Tensor], None]


class ObservableEngine(EngineLike, Protocol):
    def observe_logits(self, callback: ObserveLogits | None) -> None: ...


@dataclass(frozen=True)
class Divergence:
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    num_positions: int
    baseline: Perplexity
    candidate: Perplexity

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class PositionMeasures:
    """One value a position, from the logits of both models and the token that really came next."""

    kl: Tensor  # [n] float32, nats
    same_top1: Tensor  # [n] bool
    baseline_nll: Tensor  # [n] float32, nats
    candidate_nll: Tensor  # [n]


def measure_positions(baseline_logits: Tensor, candidate_logits: Tensor, next_token_ids: Tensor) -> PositionMeasures:
    """KL(baseline‖candidate), agreement of the argmax, and both NLLs of `next_token_ids`, row by row.

    `baseline_logits`, `candidate_logits`: [n, vocab] float32; `next_token_ids`: [n] int64.
    """
    pieces = []
    for rows in torch.arange(len(next_token_ids)).split(_ROWS_AT_ONCE):
        begin, end = int(rows[0]), int(rows[-1]) + 1
        base, cand = baseline_logits[begin:end], candidate_logits[begin:end]
        log_p, log_q = base.log_softmax(-1), cand.log_softmax(-1)
        target = next_token_ids[begin:end, None]
        pieces.append(
            PositionMeasures(
                kl=(log_p.exp() * (log_p - log_q)).sum(-1),
                same_top1=base.argmax(-1) == cand.argmax(-1),
                baseline_nll=-log_p.gather(-1, target)[:, 0],
                candidate_nll=-log_q.gather(-1, target)[:, 0],
            )
        )
    return PositionMeasures(*(torch.cat(column) for column in zip(*(vars(p).values() for p in pieces), strict=True)))


def evaluate_divergence(
    baseline: ObservableEngine,
    candidate: ObservableEngine,
    token_ids: list[int],
    plan: WindowPlan,
    counts: TextCounts,
    progress: Progress = silent,
) -> Divergence:
    """Steps both engines over the planned windows and compares every scored position.

    The caller has made sure that both models read the same token ids (`text.check_same_tokenizer`). Raises InputError
    on different vocabulary sizes, FailedError where a model's logits are not finite.
    """
    if baseline.info.vocab_size != candidate.info.vocab_size:
        raise InputError(
            f"the baseline has {baseline.info.vocab_size} words and the candidate {candidate.info.vocab_size}: "
            "distributions over different vocabularies cannot be compared"
        )
    for engine in (baseline, candidate):
        check_window_fits(plan, engine)
    started_s = time.perf_counter()
    measures: list[PositionMeasures] = []
    done = 0
    pair = (_Side(baseline), _Side(candidate))
    try:
        for index, request in enumerate(scoring_requests(token_ids, plan)):
            of_window = _compare_window(pair, request, index)
            measures.append(of_window)
            done += len(of_window.kl)
            progress("divergence", done, plan.num_scored, unit="tokens")
    finally:
        for side in pair:
            side.close()
    return _summarize(measures, plan, counts, time.perf_counter() - started_s)


class _Side:
    """One engine with at most one request in it, and the logits of its last step that were not compared yet."""

    def __init__(self, engine: ObservableEngine):
        self._engine = engine
        self._chunks: deque[tuple[int, Tensor]] = deque()
        self._request_id: str | None = None
        engine.observe_logits(self._collect)

    def start(self, request: EngineRequest) -> None:
        self._chunks.clear()
        self._request_id = request.request_id
        self._engine.add_request(request)

    def logits_from(self, position: int) -> Tensor:
        """Logits at `position` and behind it, as far as computed: [n >= 1, vocab]. Steps the engine when it must."""
        while True:
            while self._chunks and self._chunks[0][0] + len(self._chunks[0][1]) <= position:
                self._chunks.popleft()
            if self._chunks:
                start, logits = self._chunks[0]
                if start > position:
                    raise RuntimeError(f"the engine did not compute the logits at position {position}")
                return logits[position - start :]
            if self._request_id is None:
                raise RuntimeError(f"the engine finished before position {position}")
            self._step()

    def finish(self) -> None:
        while self._request_id is not None:
            self._step()
        self._chunks.clear()

    def close(self) -> None:
        self._engine.observe_logits(None)
        if self._request_id is not None:
            self._engine.abort([self._request_id])

    def _step(self) -> None:
        for output in self._engine.step():
            if output.request_id == self._request_id and output.finish_reason is not None:
                self._request_id = None
                if output.finish_reason == "error":
                    raise FailedError(f"{output.request_id} failed in the engine: {output.error}")

    def _collect(self, request_id: str, start_position: int, logits: Tensor) -> None:
        if request_id == self._request_id:
            self._chunks.append((start_position, logits))


def _compare_window(pair: tuple[_Side, _Side], request: EngineRequest, index: int) -> PositionMeasures:
    for side in pair:
        side.start(request)
    prompt = request.prompt_token_ids
    position = request.sampling_params.prompt_logprobs_start - 1  # logits here predict the first scored token
    pieces = []
    while position < len(prompt) - 1:
        base, cand = (side.logits_from(position) for side in pair)
        n = min(len(base), len(cand), len(prompt) - 1 - position)
        targets = torch.tensor(prompt[position + 1 : position + 1 + n], device=base.device)
        piece = measure_positions(base[:n], cand[:n].to(base.device), targets)
        _check_finite(piece, index, position)
        pieces.append(piece)
        position += n
        del base, cand
    for side in pair:
        side.finish()
    return PositionMeasures(*(torch.cat(c).cpu() for c in zip(*(vars(p).values() for p in pieces), strict=True)))


def _check_finite(piece: PositionMeasures, window: int, position: int) -> None:
    for who, values in (("baseline", piece.baseline_nll), ("candidate", piece.candidate_nll)):
        if not values.isfinite().all():
            where = position + int((~values.isfinite()).nonzero()[0])
            raise FailedError(f"the {who}'s logits are not finite at token {where} of window {window}")


def _summarize(measures: list[PositionMeasures], plan: WindowPlan, counts: TextCounts, elapsed_s: float) -> Divergence:
    kl = torch.cat([m.kl for m in measures]).double()
    same_top1 = torch.cat([m.same_top1 for m in measures])
    if len(kl) != plan.num_scored:
        raise RuntimeError(f"{len(kl)} positions compared of {plan.num_scored}")
    baseline_nll = [math.fsum(m.baseline_nll.tolist()) for m in measures]
    candidate_nll = [math.fsum(m.candidate_nll.tolist()) for m in measures]
    return Divergence(
        mean_kl=float(kl.mean()),
        p99_kl=float(kl.kthvalue(math.ceil(0.99 * len(kl))).values),
        max_kl=float(kl.max()),
        top1_agreement=float(same_top1.double().mean()),
        num_positions=len(kl),
        baseline=summarize(baseline_nll, plan, counts, elapsed_s),
        candidate=summarize(candidate_nll, plan, counts, elapsed_s),
    )
