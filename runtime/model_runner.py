"""ModelRunner: owns program, KVStore and device buffers, executes plans, and decides nothing."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import torch

from llmq.runtime.batch import BatchInputs, RunnerRequest
from llmq.runtime.faults import describe
from llmq.runtime.kv_store import KVStore
from llmq.runtime.programs.base import Program
from llmq.runtime.request import TokenLogprobs
from llmq.runtime.sampling.logprobs import score_tokens
from llmq.runtime.sampling.sampler import LaunchedSample, Sampler
from llmq.runtime.scheduler_output import DraftPass, RequestResult, ScheduledRequest, SchedulerOutput, StepResult
from llmq.runtime.speculative.draft_pass import DraftPasses
from llmq.runtime.speculative.drafter import Drafter
from llmq.runtime.speculative.verification import sample_with_drafts

# Rows of logits computed at once where positions of prompts are scored: 128 × 49,152 words × 4 B = 24 MiB. Pieces
# of more than 32 MiB come zeroed from the operating system each time, which costs a third of the product.
LOGITS_TILE = 128

# (request_id, position of the first row, logits [num_rows, vocab_size] float32)
LogitsObserver = Callable[[str, int, torch.Tensor], None]


class ModelRunner:
    def __init__(
        self,
        program: Program,
        store: KVStore,
        sampler: Sampler | None,
        device: torch.device,
        drafter: Drafter | None = None,
        *,
        passes: DraftPasses | None = None,
        is_alone: bool = True,
    ) -> None:
        """is_alone: no other rank computes the same program. Of several the first samples, the others have no sampler
        and learn of its tokens by the next plan. Nor have they a drafter: `passes` computes their part of it."""
        self.program = program
        self.sampler = sampler
        self.device = device
        self.store = store
        self.drafter, self._passes = drafter, passes
        self._is_alone = is_alone
        self.logits_observer: LogitsObserver | None = None
        self._requests: dict[str, RunnerRequest] = {}

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Compute the planned tokens, and sample where a request has caught up with itself."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> "LaunchedStep":
        """The same, without waiting for the device where nothing but the device needs to know what was sampled. The
        next step may be launched before this one's result is asked for; results are asked for in order."""
        self.store.staging.begin_step()
        for request_id in plan.forgotten_request_ids:
            self._requests.pop(request_id, None)
            if self.drafter is not None:
                self.drafter.forget(request_id)
        for new in plan.new_requests:
            self._requests[new.request_id] = RunnerRequest(new, len(self.store.layout.groups))
        requests = [self._requests[item.request_id] for item in plan.scheduled]
        block_tokens = [group.block_tokens for group in self.store.layout.groups]
        unfilled: list[int] = []
        for item, request in zip(plan.scheduled, requests, strict=True):
            unfilled += request.update_blocks(item, block_tokens)
            if self.sampler is None and item.new_token_ids:
                request.token_ids += item.new_token_ids
                request.forks = []
        self.store.copy_blocks(plan.block_copies)  # first: a source may have been given away since
        self.store.clear_blocks(unfilled)
        launched = LaunchedStep(self._compute(plan.scheduled))
        if self.drafter is None or not plan.drafts.num_tokens:
            return launched
        results = launched.result().results
        began_s = time.perf_counter()
        self._draft(plan, results)
        return LaunchedStep([], StepResult(results=results, draft_s=time.perf_counter() - began_s))

    def _draft(self, plan: SchedulerOutput, results: dict[str, RequestResult]) -> None:
        """Add to `results` guesses of what follows, where the plan asks for some. An end is never guessed: it comes by
        itself, as the token after the drafts."""
        items = [item for item in plan.scheduled if results[item.request_id].error is None]
        requests = [self._requests[item.request_id] for item in items]
        for request, draft in zip(requests, self.drafter.propose(items, requests, plan.drafts), strict=True):
            if not draft:
                continue
            ends = self.sampler.end_token_ids(request.params)
            draft = list(itertools.takewhile(lambda token_id, ends=ends: token_id not in ends, draft))
            results[request.request_id] = msgspec.structs.replace(results[request.request_id], draft_token_ids=draft)

    def follow(self, told: DraftPass) -> None:
        """This rank's part of what the first rank's drafter computes."""
        self._passes.follow(told, self._requests)

    def _compute(self, items: Sequence[ScheduledRequest]) -> "list[_Part]":
        """Some of a step's items, each ending at worst in an error of its own.

        A forward that raises is tried again by halves until its culprit is alone. That changes nothing for the others:
        K and V depend on a request's own tokens and go to its own slots, where the second time writes the same.
        """
        if not items:
            return []
        requests = [self._requests[item.request_id] for item in items]
        try:
            hidden, sampled = self._forward(items, requests)
            scored = self._score_prompts(items, requests, hidden)
            self._keep_hidden(items, requests, hidden, sampled)
        except Exception as error:
            if not self._is_alone:
                raise  # other ranks wait in this very forward: none can begin another
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # raises where the device itself is lost: then nothing can go on
            if len(items) == 1:
                return [_Part(requests, _Samples([1], [RequestResult(error=describe(error))]), [_Scores()], [None])]
            failed = True
        else:
            failed = False
        if failed:  # out of the handler, whose traceback would keep the failed forward's tensors
            middle = len(items) // 2
            return self._compute(items[:middle]) + self._compute(items[middle:])
        return [_Part(requests, sampled, scored, sampled.await_tokens(requests))]

    def _forward(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest]
    ) -> "tuple[torch.Tensor, _Samples]":
        """(hidden states [num_tokens, hidden_size], the samples of each item).

        The samples of an item are its own and its forks' where its last token is scheduled, else none."""
        staging = self.store.staging
        inputs = BatchInputs.build(items, requests, self.store.layout, staging)
        reads_all = self._passes is not None and self._passes.reads_hidden  # on every rank, which compute alike
        if reads_all or (self.drafter is not None and self.drafter.reads_hidden == "all"):
            inputs = replace(inputs, output_rows=None)
        hidden = self.program.forward(inputs)
        rows: list[int] = []  # of `hidden`, from which tokens are sampled:
        copies: list[int] = []  # for so many sequences each,
        owners: list[RunnerRequest] = []  # these,
        guesses: list[int | None] = []  # of which so much is guessed
        for item, request, end in zip(items, requests, inputs.query_start_loc[1:], strict=True):
            if not item.samples:
                continue
            drafts = item.draft_token_ids
            sequences = request.with_drafts(drafts) if drafts else request.sampled_as()
            rows += range(end - 1 - len(drafts), end)
            copies += [1] * len(sequences) if drafts else [len(sequences)]
            owners += sequences
            guesses += [*drafts, None] if drafts else [None] * len(sequences)
        if not rows:
            return hidden, _Samples([0] * len(items), [])
        if len(rows) < len(hidden):
            logits = self.program.logits(hidden[staging.send_integers(rows)])
        else:
            logits = self.program.logits(hidden)
        if logits is None:
            return hidden, _Samples([0] * len(items), [])
        if len(owners) > len(rows):
            logits = logits.repeat_interleave(staging.send_integers(copies), dim=0)
        counts = [item.samples * (1 + len(request.forks)) for item, request in zip(items, requests, strict=True)]
        if all(guess is None for guess in guesses):
            return hidden, _Samples(counts, self.sampler.launch(logits, owners))
        return hidden, _Samples(counts, sample_with_drafts(self.sampler, logits, owners, guesses))

    def _keep_hidden(
        self,
        items: Sequence[ScheduledRequest],
        requests: Sequence[RunnerRequest],
        hidden: torch.Tensor,
        samples: "_Samples",
    ) -> None:
        """For a drafter that reads them: without the rows of rejected drafts."""
        if self.drafter is None or self.drafter.reads_hidden == "nothing":
            return
        parts = hidden.split([item.num_scheduled_tokens for item in items])
        for item, request, rows, own in zip(items, requests, parts, samples.results, strict=True):
            has_tokens = own and own[0].error is None
            num_rejected = len(item.draft_token_ids) + 1 - len(own[0].token_ids) if has_tokens else 0
            request.hidden = rows[: len(rows) - num_rejected]

    def _score_prompts(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], hidden: torch.Tensor
    ) -> "list[_Scores]":
        """Log probabilities of the prompt tokens that each item's chunk predicts: position p is predicted at p - 1.

        Rows of all items go through the head together: it is the model's largest matrix, and reading it again for the
        few rows of each short continuation would cost more than a layer.
        """
        scores = [_Scores() for _ in items]
        owners: list[int] = []  # of each scored row: its item,
        positions: list[int] = []  # its position,
        rows: list[int] = []  # and where it lies in `hidden`
        begin = 0
        for index, (item, request) in enumerate(zip(items, requests, strict=True)):
            scored = request.scored_positions(item)
            owners += [index] * len(scored)
            positions += scored
            rows += [begin + position - item.num_computed_tokens for position in scored]
            begin += item.num_scheduled_tokens
        for tile in range(0, len(rows), LOGITS_TILE):
            logits = self.program.logits(hidden[self.store.staging.send_integers(rows[tile : tile + LOGITS_TILE])])
            if logits is None:
                continue
            offset = 0
            for index, of_item in itertools.groupby(owners[tile : tile + LOGITS_TILE]):
                count, position = len(list(of_item)), positions[tile + offset]
                self._score_rows(requests[index], position, logits[offset : offset + count], scores[index])
                offset += count
        return scores

    def _score_rows(self, request: RunnerRequest, position: int, logits: torch.Tensor, scores: "_Scores") -> None:
        """Add what `logits` say of the prompt tokens behind `position`. What fails is this request's error."""
        if scores.error is not None:
            return
        try:
            if self.logits_observer is not None:
                self.logits_observer(request.request_id, position, logits)
            targets = request.token_ids[position + 1 : position + 1 + len(logits)]
            scores.entries += score_tokens(logits, targets, request.params.prompt_logprobs)
        except Exception as raised:
            scores.error = describe(raised)


class LaunchedStep:
    """A step that was handed to the device."""

    def __init__(self, parts: "Sequence[_Part]", ended: StepResult | None = None) -> None:
        self._parts, self._ended = parts, ended

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Waits for the device. What was sampled is known to its requests from then on."""
        if self._ended is None:
            results: dict[str, RequestResult] = {}
            for part in self._parts:
                results |= part.read()
            self._ended = StepResult(results=results)
        return self._ended


@dataclass(frozen=True)
class _Samples:
    """What was sampled for so many sequences of each item: itself and its forks, or nothing."""

    counts: Sequence[int]
    made: LaunchedSample | Sequence[RequestResult]

    def await_tokens(self, requests: Sequence[RunnerRequest]) -> list[int | None]:
        """The position of each request's next token, which is known to the device only; None: there is none."""
        if not isinstance(self.made, LaunchedSample):
            return [None] * len(requests)
        rows = itertools.accumulate(self.counts, initial=0)
        return [
            request.await_token(self.made.draws, row) if count else None
            for request, count, row in zip(requests, self.counts, rows, strict=False)
        ]

    @cached_property
    def results(self) -> list[list[RequestResult]]:
        """The samples of each item. Waits for the device."""
        made = iter(self.made.read() if isinstance(self.made, LaunchedSample) else self.made)
        return [list(itertools.islice(made, count)) for count in self.counts]


@dataclass(frozen=True)
class _Part:
    """Items of a step that were computed together."""

    requests: Sequence[RunnerRequest]
    samples: _Samples
    scores: "Sequence[_Scores]"
    positions: Sequence[int | None]  # of tokens that requests wait for

    def read(self) -> dict[str, RequestResult]:
        """Waits for the device."""
        return {
            request.request_id: _result(request, made, scores, position)
            for request, made, scores, position in zip(
                self.requests, self.samples.results, self.scores, self.positions, strict=True
            )
        }


@dataclass
class _Scores:
    """Of one item: the prompt positions predicted in this step, in order, or why there are none."""

    entries: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None


def _result(
    request: RunnerRequest, sampled: list[RequestResult], scores: _Scores, position: int | None
) -> RequestResult:
    """What an item brings. An error of one of several sequences of a prompt is an error of all."""
    error = next((one.error for one in sampled if one.error is not None), scores.error)
    if error is not None:
        return RequestResult(error=error)
    if not sampled:
        return RequestResult(prompt_logprobs=scores.entries)
    own, *others = sampled
    if position is None:
        request.token_ids.extend(own.token_ids)
    else:
        request.learn_token(position, own.token_ids[0])
    forks = {name: made for (name, _), made in zip(request.forks, others, strict=True)}
    request.forks = []
    return msgspec.structs.replace(own, prompt_logprobs=scores.entries, forks=forks)
