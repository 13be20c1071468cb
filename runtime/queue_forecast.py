"""QueueForecast: when the first token of each waiting request will come, and for whom that is too late."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmq.profiles.step_cost import StepShape
from llmq.runtime.policy import LEAST_CHUNK, SloPolicy
from llmq.runtime.request import Request

if TYPE_CHECKING:
    from llmq.runtime.scheduler import Scheduler

# A wait that is foreseen may come out longer by this: lengths are means, and who comes later may go first. Told at
# once, a client can go elsewhere; told late, it has lost that time.
CAUTION = 1.25


@dataclass(frozen=True)
class Late:
    """A waiting request that cannot have its first token in time."""

    request: Request
    ttft_s: float  # what it would be
    prompt_s: float  # of which its own prompt takes so much, beside those that decode
    retry_after_s: float  # the queue will then be short enough, if nobody else comes


class QueueForecast:
    """List scheduling: each waiting request takes the slot that is free first, and prompts are computed one after the
    other, each as fast as the decodes beside it leave room."""

    def __init__(self, policy: SloPolicy, ttft_s: float) -> None:
        self._policy = policy
        self._ttft_s = ttft_s
        self._to_compute: dict[str, int] = {}  # of who waits and has been let in: tokens that no prefix hit saves

    def late(self, scheduler: "Scheduler", now_s: float) -> list[Late]:
        """Who of those that wait is to be told so now: those that came since the last call by the whole forecast, those
        that were let in then only where they would be late if they were next. Never who has brought a token.

        `now_s` is on the clock of `arrival_time_s`.
        """
        known, self._to_compute = self._to_compute, {}
        waiting = list(scheduler.waiting)
        if not waiting:
            return []
        found, spread = [], self._policy.spread
        line = _Line.of(self._policy, scheduler, waiting)
        has_new = any(request.request_id not in known for request in waiting)
        to_come = scheduler.admission.mean_to_come(waiting)
        for request, remaining, copies in zip(waiting, to_come.remaining, to_come.copies, strict=True):
            name = request.request_id
            num_new = known.get(name)
            if is_new := num_new is None:
                num_new = request.num_tokens_to_compute - scheduler.kv.get_computed_blocks(request).num_tokens
            next_s = line.next_s(num_new)
            place = line.place(num_new) if has_new else _Place(0.0, next_s, next_s, next_s)
            prompt_s = place.first_s - place.start_s
            own_s = spread * (prompt_s if is_new else next_s)
            expected_s = own_s + (CAUTION * place.start_s if is_new else 0.0)
            has_begun = request.num_output_tokens or request.num_preemptions
            waited_s = now_s - request.arrival_time_s
            if waited_s + expected_s > self._ttft_s and not has_begun:
                retry_after_s = place.start_s - max(0.0, self._ttft_s - spread * prompt_s) / CAUTION
                found.append(Late(request, waited_s + place.first_s, prompt_s, max(0.0, retry_after_s)))
                continue
            self._to_compute[name] = num_new
            if has_new:
                line.take(place, int(remaining), int(copies))
        return found


@dataclass(frozen=True)
class _Place:
    start_s: float  # from now, as the others
    computed_s: float  # the prompt: the next one can begin
    first_s: float
    step_s: float  # of its decodes


class _Line:
    """Slots and the one prompt at a time, in seconds from now."""

    def __init__(self, policy: SloPolicy, slots: int, context: int) -> None:
        self._policy = policy
        self._slots = slots
        self._context = context
        self._ends_s: list[float] = []  # a heap: when who has a slot will have ended
        self._free_s = 0.0  # when the next prompt can begin

    @classmethod
    def of(cls, policy: SloPolicy, scheduler: "Scheduler", waiting: Sequence[Request]) -> "_Line":
        to_come = scheduler.admission.mean_to_come([*scheduler.running, *waiting])
        context = int(np.average(to_come.tokens + to_come.remaining // 2, weights=to_come.copies))
        slots = policy.most_decodes(context)
        if len(scheduler.kv.groups) == 1:
            capacity = scheduler.kv.pool.num_blocks * scheduler.kv.groups[0].block_tokens
            slots = max(1, min(slots, capacity // max(1, context)))
        line = cls(policy, slots, context)
        running = len(scheduler.running)
        chunk, step_s = line._at(running)
        for request, remaining in zip(scheduler.running, to_come.remaining[:running], strict=True):
            left = request.num_tokens_to_compute - request.num_computed_tokens
            if left > 1:
                line._free_s += left / chunk * step_s
            heapq.heappush(line._ends_s, (line._free_s if left > 1 else 0.0) + int(remaining) * step_s)
        line._keep_the_last()
        return line

    def place(self, num_new: int) -> _Place:
        """Where a prompt of `num_new` tokens to compute would come."""
        while self._ends_s and self._ends_s[0] <= self._free_s:
            heapq.heappop(self._ends_s)
        is_full = len(self._ends_s) >= self._slots
        start_s = self._ends_s[0] if is_full else self._free_s
        busy = len(self._ends_s) - is_full
        chunk, step_s = self._at(busy)
        computed_s = start_s + num_new / chunk * step_s
        first_s = max(computed_s, start_s + self._prompt_s(busy, num_new))
        return _Place(start_s, computed_s, first_s, self._at(max(1, busy))[1])

    def take(self, place: _Place, num_outputs: int, num_sequences: int) -> None:
        self._free_s = place.computed_s
        for _ in range(num_sequences):
            heapq.heappush(self._ends_s, place.first_s + num_outputs * place.step_s)
        self._keep_the_last()

    def _keep_the_last(self) -> None:
        """The next one waits for as many to end as there are too many, so the first that end give no slot."""
        while len(self._ends_s) > self._slots:
            heapq.heappop(self._ends_s)

    def next_s(self, num_new: int) -> float:
        """Until the first token of whoever is next, if a slot and the step's prompt tokens are its own now."""
        return self._prompt_s(min(len(self._ends_s), self._slots - 1), num_new)

    def _prompt_s(self, busy: int, num_new: int) -> float:
        """What `num_new` prompt tokens take beside `busy` decodes: whole steps at their pace, or a part of one."""
        chunk, step_s = self._at(busy)
        if num_new >= chunk:
            return num_new / chunk * step_s
        shape = StepShape.decode(busy, self._context) + StepShape.chunk(num_new, self._context // 2)
        return self._policy.model.cost.step_s(shape)

    def _at(self, busy: int) -> tuple[int, float]:
        """(prompt tokens of a step beside `busy` decodes, the time of that step)."""
        cost, most = self._policy.model.cost, self._policy.most.max_num_batched_tokens
        decodes = StepShape.decode(busy, self._context)
        chunk = max(1, most - busy)
        if busy:
            left_s = self._policy.step_limit_s - cost.step_s(decodes)
            chunk = max(1, min(chunk, max(LEAST_CHUNK, cost.tokens_within(left_s, self._context // 2, busy))))
            # An eighth at most is given up to end on a block border: where no other prompt has a slot, to nobody.
            chunk -= chunk // 8
        return chunk, cost.step_s(decodes + StepShape.chunk(chunk, self._context // 2))
