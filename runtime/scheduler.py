"""Scheduler: owns requests and queues, and decides what a step computes."""

import bisect
from collections.abc import Iterable

from llmq.runtime.admission import LengthHistory, peak_blocks
from llmq.runtime.fair_queue import FairQueue
from llmq.runtime.kv_manager import KVCacheManager, PrefixHit
from llmq.runtime.policy import StepPolicy
from llmq.runtime.request import EngineRequest, FinishReason, Request, RequestOutput
from llmq.runtime.scheduler_output import NewRequest, ScheduledRequest, SchedulerOutput, StepResult


class Scheduler:
    """Continuous batching under one token budget a step.

    There is no prefill phase and no decode phase: each request has `num_computed_tokens`, which catches up with
    `num_tokens`. Running requests go first, in order of priority and arrival, then waiting ones; a long prompt takes
    what is left of the budget. When the pool runs dry the last running request gives its blocks back and waits: its
    tokens are recomputed later.
    """

    def __init__(
        self, kv: KVCacheManager, policy: StepPolicy, eos_token_ids: Iterable[int], max_model_len: int
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.running: list[Request] = []  # in `Request.order`
        self.waiting = FairQueue()
        self.lengths = LengthHistory()
        self.num_preemptions = self.preempted_tokens = self.num_deferrals = 0
        self._requests: dict[str, Request] = {}
        self._parents: dict[str, Request] = {}  # of forks that are still to come
        self._known_to_runner: dict[str, list[int]] = {}  # request -> blocks sent, by group
        self._forgotten: list[str] = []
        self._step = 0

    def add_request(self, request: EngineRequest) -> None:
        names = [request.request_id, *(name for name, _ in request.forks)]
        for name in names:
            if name in self._requests or name in self._parents or names.count(name) > 1:
                raise ValueError(f"request id {name!r} is in use")
        state = Request(request)
        self._requests[state.request_id] = state
        self._parents.update({name: state for name, _ in request.forks})
        self.waiting.push(state)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, its blocks freed. None when it is not known (it may just have finished)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)
        elif (parent := self._parents.pop(request_id, None)) is not None:
            parent.forks = [fork for fork in parent.forks if fork[0] != request_id]
        else:
            return None
        return RequestOutput(request_id=request_id, finish_reason="abort")

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def schedule(self) -> SchedulerOutput:
        """The next step: who computes how many tokens, with which blocks."""
        budget = self.policy.max_num_batched_tokens
        scheduled: list[tuple[Request, int]] = []
        preempted = False

        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            while not (fits := self.kv.allocate_slots(request, num_new)):
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            if not fits:
                break
            scheduled.append((request, num_new))
            budget -= num_new
            position += 1

        # Whoever was just preempted heads the queue: admitting now would take back the blocks that it gave.
        if not preempted:
            self._admit_waiting(budget, scheduled)
        for request, num_new in scheduled:
            self.waiting.charge(request.tenant, num_new)
        return self._plan(scheduled)

    def _admit_waiting(self, budget: int, scheduled: list[tuple[Request, int]]) -> None:
        """Start waiting requests with what is left of the budget, in the queue's order, while there is room."""
        if self.running and not self.policy.admit_while_running:
            return
        for request in self.waiting:
            if budget == 0 or len(self.running) >= self.policy.max_num_seqs:
                return
            hit = self.kv.get_computed_blocks(request)
            if hit.continues_soon:
                continue  # the same prefix is being computed: it waits, and takes it from the cache
            if not self._has_room(request, hit):
                return  # nobody overtakes: a large request would wait for ever
            num_new = min(request.num_tokens - hit.num_tokens, budget)
            if not self.kv.allocate_slots(request, num_new, hit):
                return
            self.waiting.remove(request)
            self._admit(request, hit.num_tokens)
            scheduled.append((request, num_new))
            budget -= num_new

    def _has_room(self, request: Request, hit: PrefixHit) -> bool:
        """Whether `request` fits now, and will together with all that run until they have ended.

        Admitting by what fits now alone is what makes a full pool thrash: each preemption throws away what it computed.
        """
        if self.kv.blocks_to_admit(request, hit) > self.kv.pool.num_free_blocks:
            return False
        if not self.running:
            return True
        together = [*self.running, request]
        peak = peak_blocks(
            self.kv.groups,
            [one.num_tokens for one in together],
            [min(self.lengths.expected_remaining(one), self.max_model_len - one.num_tokens) for one in together],
        )
        fits = peak <= self.kv.pool.num_blocks
        self.num_deferrals += not fits
        return fits

    def update_from_output(self, plan: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
        """Commit what a step computed and say what it brought for each request."""
        outputs = []
        for item in plan.scheduled:
            request = self._requests.get(item.request_id)
            if request is None:
                continue  # aborted while the step ran
            made = result.results[item.request_id]
            if made.error is not None:
                self._finish(request)
                outputs.append(RequestOutput(request_id=request.request_id, finish_reason="error", error=made.error))
                continue
            request.num_computed_tokens = item.num_computed_tokens + item.num_scheduled_tokens
            request.prompt_logprobs.extend(made.prompt_logprobs)
            self.kv.commit(request)
            if request.num_computed_tokens >= request.num_tokens:
                children = self._fork(request)
                outputs.append(self._commit_tokens(request, made))
                outputs += map(self._commit_tokens, children, made.forks)
        return outputs

    def _fork(self, request: Request) -> list[Request]:
        """The request's forks as requests of their own, sharing its blocks: running, or waiting where there is no
        room for more sequences."""
        children = [request.fork(name, seed) for name, seed in request.forks]
        request.forks = []
        for child in children:
            self._parents.pop(child.request_id)
            self._requests[child.request_id] = child
            if len(self.running) < self.policy.max_num_seqs:
                self.kv.fork(request.request_id, child.request_id)
                bisect.insort(self.running, child, key=_order)
            else:
                child.num_computed_tokens = 0
                self.waiting.push(child)
        return children

    def _commit_tokens(self, request: Request, made) -> RequestOutput:
        accepted = 0
        reason: FinishReason | None = "length" if request.sampling_params.max_tokens == 0 else None
        for token_id in made.token_ids:
            request.token_ids.append(token_id)
            accepted += 1
            reason = self._finish_reason(request, token_id)
            if reason:
                break
        output = RequestOutput(
            request_id=request.request_id,
            new_token_ids=made.token_ids[:accepted],
            logprobs=made.logprobs[:accepted] if request.sampling_params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs if request.prompt_logprobs_pending else None,
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=reason,
            stop_token_id=request.token_ids[-1] if reason == "stop" else None,
        )
        request.prompt_logprobs_pending = False
        request.prompt_logprobs = []
        if reason:
            self.lengths.record(request.num_output_tokens)
            self._finish(request)
        return output

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.sampling_params
        ends = token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos)
        if ends and request.num_output_tokens > params.min_tokens:
            return "stop"
        if request.num_output_tokens >= params.max_tokens or request.num_tokens >= self.max_model_len:
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
        if self._known_to_runner.pop(request_id, None) is not None:
            self._forgotten.append(request_id)

    def _plan(self, scheduled: list[tuple[Request, int]]) -> SchedulerOutput:
        new_requests, items = [], []
        for request, num_new in scheduled:
            sent = self._known_to_runner.get(request.request_id)
            if sent is None:
                sent = [0] * len(self.kv.groups)
                new_requests.append(
                    NewRequest(
                        request_id=request.request_id,
                        token_ids=list(request.token_ids),
                        num_prompt_tokens=request.num_prompt_tokens,
                        sampling_params=request.sampling_params,
                        score_prompt=request.prompt_logprobs_pending,
                        forks=request.forks,
                    )
                )
            # The block that is written next is sent again: a copy-on-write may have replaced it.
            sent = [
                min(first, request.num_computed_tokens // group.block_tokens)
                for first, group in zip(sent, self.kv.groups, strict=True)
            ]
            block_ids = self.kv.block_ids(request.request_id, sent)
            items.append(
                ScheduledRequest(
                    request_id=request.request_id,
                    num_computed_tokens=request.num_computed_tokens,
                    num_scheduled_tokens=num_new,
                    block_ids=block_ids,
                    first_block=tuple(sent),
                    samples=request.num_computed_tokens + num_new == request.num_tokens
                    and request.sampling_params.max_tokens > 0,
                )
            )
            self._known_to_runner[request.request_id] = [
                first + len(ids) for first, ids in zip(sent, block_ids, strict=True)
            ]
        self._step += 1
        forgotten, self._forgotten = self._forgotten, []
        return SchedulerOutput(
            step=self._step,
            new_requests=new_requests,
            scheduled=items,
            forgotten_request_ids=forgotten,
            block_copies=self.kv.take_block_copies(),
            num_scheduled_tokens=sum(num_new for _, num_new in scheduled),
        )


def _order(request: Request) -> tuple[int, float]:
    return request.order
