"""Scheduler: owns requests and queues, and decides what a step computes."""

import bisect
from collections.abc import Iterable
from functools import partial

from llmq.runtime.admission import Admission
from llmq.runtime.beam_search import BeamSearch
from llmq.runtime.fair_queue import FairQueue
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.policy import StepPolicy
from llmq.runtime.request import EngineRequest, FinishReason, Request, RequestOutput
from llmq.runtime.scheduler_output import NewRequest, RequestResult, ScheduledRequest, SchedulerOutput, StepResult


class Scheduler:
    """Continuous batching under one token budget a step.

    There is no prefill phase and no decode phase: each request has `num_computed_tokens`, which catches up with
    `num_tokens`. Running requests go first, in order of priority and arrival, then waiting ones; a long prompt takes
    what is left of the budget. When the pool runs dry the last running request gives its blocks back and waits: its
    tokens are recomputed later.

    With `depth` > 1 so many steps are in flight at once. Where they are in the stages of a pipeline, a request whose
    next token is being computed is in none of the others, and sequences are shared out among them; chunks of a prompt
    follow each other without waiting. Every stage computes the steps in their order, so blocks may change hands while
    steps that read them are in flight.

    With `unseen` the next step computes a token that the last one samples and nobody has read: its place is planned,
    and the runner knows the token. One that ends its request is found a step later, when that step's is dropped. K and
    V of what was not read are committed to no prefix cache: `num_computed_tokens` counts what has come back.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        policy: StepPolicy,
        eos_token_ids: Iterable[int],
        max_model_len: int,
        depth: int = 1,
        *,
        unseen: bool = False,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.depth, self.unseen = depth, unseen
        self.running: list[Request] = []  # in `Request.order`
        self.waiting = FairQueue()
        self.admission = Admission(kv, max_model_len)
        self.num_preemptions = self.preempted_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0  # verified, and found to be what the model says
        self._requests: dict[str, Request] = {}
        self._parents: dict[str, Request] = {}  # of forks that are still to come
        self._searches: dict[str, BeamSearch] = {}  # by the name of the request that started it
        self._num_beams = 0
        self._known_to_runner: set[str] = set()
        self._forgotten: list[str] = []
        self._in_flight: dict[int, list[Request]] = {}  # step -> whose tokens it computes, in its order
        self._step = 0

    def add_request(self, request: EngineRequest) -> None:
        names = request.names
        for name in names:
            if self._is_in_use(name) or names.count(name) > 1:
                raise ValueError(f"request id {name!r} is in use")
        state = Request(request)
        if request.beams is not None:
            state.search = self._start_search(names, request)
            state.forks = []
        self._requests[state.request_id] = state
        self._parents.update({name: state for name, _ in state.forks})
        self.waiting.push(state)

    def _is_in_use(self, name: str) -> bool:
        searched = (search.names for search in self._searches.values())
        return name in self._requests or name in self._parents or any(name in names for names in searched)

    def _start_search(self, names: list[str], request: EngineRequest) -> BeamSearch:
        params = request.sampling_params
        search = BeamSearch(
            names,
            request.beams,
            max_tokens=min(params.max_tokens, self.max_model_len - len(request.prompt_token_ids)),
            end_token_ids=params.stop_token_ids | (frozenset() if params.ignore_eos else self.eos_token_ids),
            live={request.request_id: 0.0},
        )
        self._searches[request.request_id] = search
        return search

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, its blocks freed. None when it is not known (it may just have finished)."""
        request = self._requests.get(request_id)
        if (search := self._searches.pop(request_id, None)) is not None:
            for name in search.live:
                self._finish(self._requests[name])
        elif request is not None:
            if request.num_output_tokens:
                self.admission.lengths.record(request.num_output_tokens)
            self._finish(request)
        elif (parent := self._parents.pop(request_id, None)) is not None:
            parent.forks = [fork for fork in parent.forks if fork[0] != request_id]
        else:
            return None
        return RequestOutput(request_id=request_id, finish_reason="abort")

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def schedule(self) -> SchedulerOutput | None:
        """The next step: who computes how many tokens, with which blocks. None: nobody, until a step that is in flight
        has ended (`update_from_output`)."""
        budget, share = self.policy.max_num_batched_tokens, self._share()
        # A token for each that runs: a prompt before it leaves it that.
        surplus = budget - min(len(self.running), share)
        scheduled: list[tuple[Request, int]] = []
        preempted = False
        allocate_slots = partial(self.kv.allocate_slots, num_lookahead_tokens=self.policy.num_lookahead_tokens)

        for request in self.running:  # whoever is preempted goes from its end, which this loop then does not reach
            if budget == 0:
                break
            if request.search is not None and request.is_held:
                continue
            in_flight = request.num_tokens_in_flight
            if in_flight and request.num_planned_tokens >= request.num_tokens_to_plan:
                continue
            if not in_flight:
                if share == 0:
                    continue
                share -= 1
            most = min(budget, 1 + max(surplus, 0))
            num_new = self._chunk(self._num_wanted(request), request.num_planned_tokens, most)
            while not (fits := allocate_slots(request, in_flight + num_new)):
                preempted = True
                victim = self.running[-1]
                if victim.num_tokens_in_flight:
                    break
                self._preempt(victim)
                if victim is request:
                    break
            if not fits:
                break
            scheduled.append((request, num_new))
            budget -= num_new
            surplus -= num_new - 1
        served: dict[str, int] = {}
        for request, num_new in scheduled:
            served[request.tenant] = served.get(request.tenant, 0) + num_new
        for tenant, num_tokens in served.items():
            self.waiting.charge(tenant, num_tokens)

        # Whoever was just preempted heads the queue: admitting now would take back the blocks that it gave.
        if not preempted:
            self._admit_waiting(budget, share, scheduled)
        while self.running and not scheduled and not self._in_flight:
            # All that run wait for siblings that have no room (or none of it but their own): they give way.
            self._preempt(self.running[-1])
            self._admit_waiting(budget, self.policy.max_num_seqs, scheduled)
        return self._plan(scheduled) if scheduled or not self._in_flight else None

    def _share(self) -> int:
        """Most sequences of a step: all that may run, shared out among those in flight where a request is in one."""
        running, steps = len(self.running), 1 if self.unseen else self.depth
        return -(-min(running + len(self.waiting), max(running, self.policy.max_num_seqs)) // steps)

    def _admit_waiting(self, budget: int, share: int, scheduled: list[tuple[Request, int]]) -> None:
        """Start up to `share` waiting requests with what is left of the budget, in the queue's order, while there is
        room."""
        if self.running and not self.policy.admit_while_running:
            return
        for request in self.waiting:
            if budget == 0 or share == 0 or len(scheduled) >= self.policy.max_num_seqs:
                return
            if self._in_flight and len(self.running) >= self.policy.max_num_seqs:
                return
            if request.is_held:
                continue
            hit, is_busy = self.kv.get_computed_blocks(request), bool(scheduled or self._in_flight)
            if hit.continues_soon and is_busy:
                continue  # the same prefix is being computed: it waits, and takes it from the cache
            if not self.admission.has_room(request, hit, self.running if is_busy else ()):
                return  # nobody overtakes: a large request would wait for ever
            num_new = self._chunk(request.num_tokens_to_compute, hit.num_tokens, budget)
            if not self.kv.allocate_slots(request, num_new, hit, self.policy.num_lookahead_tokens):
                return
            self.waiting.remove(request)
            self._admit(request, hit.num_tokens)
            scheduled.append((request, num_new))
            self.waiting.charge(request.tenant, num_new)  # at once: who is next in this very step depends on it
            budget -= num_new
            share -= 1

    def _num_wanted(self, request: Request) -> int:
        """How many tokens a running request has to compute in all, the drafts behind them too where there are blocks
        for them: a guess is worth nobody's blocks."""
        num_tokens, num_drafts = request.num_tokens_to_plan, len(request.draft_token_ids)
        return num_tokens + num_drafts if num_drafts and self.kv.has_room(num_drafts + 1) else num_tokens

    def _chunk(self, num_tokens: int, num_computed_tokens: int, budget: int) -> int:
        """How many tokens to compute next: all that are missing, or as many of them as `budget` allows.

        A chunk that leaves some ends on a block border where that gives up little of it. Attention computes tiles of
        query rows, and the rows of a ragged last tile cost more than whole ones: a budget of 512 that four decodes have
        bitten into would make every chunk of a long prompt slower than one of 512 tokens.
        """
        num_new = num_tokens - num_computed_tokens
        if num_new <= budget:
            return num_new
        beyond = (num_computed_tokens + budget) % self.kv.alignment
        return budget - beyond if beyond <= budget // 8 else budget

    def update_from_output(self, plan: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
        """Commit what a step computed and say what it brought for each request."""
        outputs: list[RequestOutput] = []
        for item, request in zip(plan.scheduled, self._in_flight.pop(plan.step), strict=True):
            name = item.request_id
            if self._requests.get(name) is not request:
                continue  # aborted while the step ran
            made = result.results[name]
            if made.error is not None:
                outputs += self._fail(request, made.error)
                continue
            request.num_tokens_in_flight -= item.num_scheduled_tokens
            if item.samples and request.num_unknown_tokens:
                request.num_unknown_tokens -= 1
            end = item.num_computed_tokens + item.num_scheduled_tokens
            request.num_computed_tokens = end - self._count_rejected(item, made)
            if made.prompt_logprobs:
                request.prompt_logprobs.extend(made.prompt_logprobs)
            self.kv.commit(request)
            if request.num_computed_tokens >= request.num_tokens_to_compute:
                request.draft_token_ids = made.draft_token_ids
                outputs += self._advance(request, made)
        return outputs

    def _count_rejected(self, item: ScheduledRequest, made: RequestResult) -> int:
        """How many drafts of an item the model does not follow: their K and V are overwritten by the next step's."""
        num_drafts = len(item.draft_token_ids)
        if not num_drafts:
            return 0
        num_accepted = len(made.token_ids) - 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        return num_drafts - num_accepted

    def _max_draft_tokens(self, request: Request, num_drafts: int) -> int:
        """How many drafts its next step can verify where all `num_drafts` of this one are right: a step ends with a
        token that is none, and none is beyond the request's end. A beam is not guessed."""
        if not self.policy.drafts.num_tokens or request.search is not None:
            return 0
        left = min(
            request.sampling_params.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens
        )
        return max(0, min(self.policy.drafts.num_tokens, left - (num_drafts + 1) - 1))

    def _fail(self, request: Request, error: str) -> list[RequestOutput]:
        names = request.names
        self.abort(names[0])
        return [RequestOutput(request_id=name, finish_reason="error", error=error) for name in names]

    def _advance(self, request: Request, made: RequestResult) -> list[RequestOutput]:
        """A request has caught up with itself: add the token that was sampled, or let its beam search decide."""
        if request.search is None:
            if not request.forks:
                return [self._commit_tokens(request, made)]
            children = [self._fork(request, name, seed) for name, seed in request.forks]
            request.forks = []
            for child in children:
                self._parents.pop(child.request_id)
            firsts = [made, *(made.forks[child.request_id] for child in children)]
            return [self._commit_tokens(*pair) for pair in zip([request, *children], firsts, strict=True)]
        search = request.search
        if not search.report(request.request_id, request.token_ids[request.num_prompt_tokens :], made.logprobs[0].top):
            return []
        extensions = search.extend()
        parents = [self._requests[name] for name in search.live]
        search.live = {}
        for extension in extensions:
            self._num_beams += 1
            child = self._fork(self._requests[extension.parent_id], f"{search.names[0]}/beam {self._num_beams}", None)
            child.token_ids.append(extension.token_id)
            search.live[child.request_id] = extension.logprob
        for parent in parents:
            self._finish(parent)
        return [] if search.live else self._best_hypotheses(search)

    def _best_hypotheses(self, search: BeamSearch) -> list[RequestOutput]:
        self._searches.pop(search.names[0])
        return [
            RequestOutput(
                request_id=name,
                new_token_ids=hypothesis.token_ids,
                cumulative_logprob=hypothesis.logprob,
                finish_reason=hypothesis.finish_reason,
                stop_token_id=hypothesis.stop_token_id,
            )
            for name, hypothesis in zip(search.names, search.best(), strict=False)
        ]

    def _fork(self, parent: Request, name: str, seed: int | None) -> Request:
        """Another request that goes on from what `parent` has computed, sharing its blocks: running, or waiting where
        there is no room for more sequences (or the parent has lost its blocks)."""
        child = parent.fork(name, seed)
        self._requests[name] = child
        if len(self.running) < self.policy.max_num_seqs and parent in self.running:
            self.kv.fork(parent.request_id, name)
            bisect.insort(self.running, child, key=_order)
        else:
            child.num_computed_tokens = 0
            self.waiting.push(child)
        return child

    def _commit_tokens(self, request: Request, made: RequestResult) -> RequestOutput:
        token_ids = made.token_ids
        reason: FinishReason | None = "length" if request.sampling_params.max_tokens == 0 else None
        for accepted, token_id in enumerate(token_ids, 1):
            request.token_ids.append(token_id)
            reason = self._finish_reason(request, token_id)
            if reason:
                token_ids = token_ids[:accepted]
                break
        output = RequestOutput(
            request_id=request.request_id,
            new_token_ids=token_ids,
            logprobs=None if request.sampling_params.logprobs is None else made.logprobs[: len(token_ids)],
            prompt_logprobs=request.prompt_logprobs if request.prompt_logprobs_pending else None,
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=reason,
            stop_token_id=request.token_ids[-1] if reason == "stop" else None,
        )
        request.prompt_logprobs_pending = False
        if request.prompt_logprobs:
            request.prompt_logprobs = []
        if len(token_ids) > 1:
            self.kv.commit(request)  # accepted drafts are tokens since now
        if reason:
            self.admission.lengths.record(request.num_output_tokens)
            self._finish(request)
        return output

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params, num_tokens = request.sampling_params, len(request.token_ids)
        num_output_tokens = num_tokens - request.num_prompt_tokens
        ends = token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos)
        if ends and num_output_tokens > params.min_tokens:
            return "stop"
        if num_output_tokens >= params.max_tokens or num_tokens >= self.max_model_len:
            return "length"
        return None

    def _admit(self, request: Request, num_cached_tokens: int) -> None:
        request.num_computed_tokens = num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens
        bisect.insort(self.running, request, key=_order)

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.kv.free(victim.request_id)
        self._forget(victim.request_id)
        self.preempted_tokens += victim.num_computed_tokens
        victim.num_computed_tokens = 0
        victim.draft_token_ids = []
        victim.prompt_logprobs = []  # not delivered yet: they are computed again
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(victim)

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        for name, _ in request.forks:  # it ended before its first token, and they with it
            self._parents.pop(name, None)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.kv.free(request.request_id)
        self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        if request_id in self._known_to_runner:
            self._known_to_runner.remove(request_id)
            self._forgotten.append(request_id)

    def _goes_on_unseen(self, request: Request) -> bool:
        """Whether the token that is being sampled may be computed before it is read: it is not the last by its number,
        and a drafter guesses by none."""
        if not self.unseen or self.policy.drafts.num_tokens or not request.is_sampled_unseen:
            return False
        num_unknown = request.num_unknown_tokens + 1
        return (
            request.num_output_tokens + num_unknown < request.sampling_params.max_tokens
            and request.num_tokens + num_unknown < self.max_model_len
        )

    def _plan(self, scheduled: list[tuple[Request, int]]) -> SchedulerOutput:
        new_requests, items = [], []
        num_tokens = num_prompt_tokens = 0
        for request, num_new in scheduled:
            name, computed = request.request_id, request.num_planned_tokens
            if name not in self._known_to_runner:
                self._known_to_runner.add(name)
                new_requests.append(_in_full(request))
                request.num_tokens_told = request.num_tokens
            first_block, block_ids = self.kv.take_new_block_ids(name)
            num_drafts = computed + num_new - request.num_tokens - request.num_unknown_tokens
            samples = num_drafts >= 0 and request.sampling_params.max_tokens > 0
            items.append(
                ScheduledRequest(
                    request_id=name,
                    num_computed_tokens=computed,
                    num_scheduled_tokens=num_new,
                    samples=samples,
                    new_token_ids=request.token_ids[request.num_tokens_told :],
                    first_block=first_block,
                    block_ids=block_ids,
                    draft_token_ids=request.draft_token_ids[: max(0, num_drafts)],
                    max_draft_tokens=self._max_draft_tokens(request, num_drafts) if samples else 0,
                )
            )
            request.num_tokens_told = len(request.token_ids)
            request.num_tokens_in_flight += num_new
            request.num_unknown_tokens += samples and self._goes_on_unseen(request)
            num_tokens += num_new
            if computed < request.num_prompt_tokens:
                num_prompt_tokens += min(num_new, request.num_prompt_tokens - computed)
        self._step += 1
        self._in_flight[self._step] = [request for request, _ in scheduled]
        forgotten, self._forgotten = self._forgotten, []
        return SchedulerOutput(
            step=self._step,
            new_requests=new_requests,
            scheduled=items,
            forgotten_request_ids=forgotten,
            block_copies=self.kv.take_block_copies(),
            num_scheduled_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            drafts=self.policy.drafts,
        )


def _in_full(request: Request) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        score_prompt=request.prompt_logprobs_pending,
        forks=request.forks,
        cache_salt=request.cache_salt,
    )


def _order(request: Request) -> tuple[int, float]:
    return request.order
