"""StepPolicy: the numbers by which the scheduler fills a step. The scheduler itself reads no clock and no load."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from llmq.profiles.slo import Slo
from llmq.profiles.step_cost import ROW_KNOTS, StepCost, StepCostModel, StepShape
from llmq.runtime.request import Request
from llmq.runtime.scheduler_output import DraftTerms, SchedulerOutput

if TYPE_CHECKING:
    from llmq.runtime.scheduler import Scheduler

# What a waiting or half computed prompt gets of a step however little time is left: less, and it would hold its blocks
# for ever; a chunk of less than a block reads as many keys for fewer queries.
LEAST_CHUNK = 16


class StepPolicy(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    drafts: DraftTerms = DraftTerms()
    num_lookahead_tokens: int = 0  # slots behind a request's tokens, for a drafter that computes its guesses' K and V
    # False is static batching: nothing is admitted before all that runs has ended. For comparison in benchmarks only.
    admit_while_running: bool = True


class SloPolicy:
    """The StepPolicy of each next step, such that whoever decodes keeps its time per output token.

    A decoding request gets a token a step: its TPOT is the mean time of a step. So a step's prompt tokens are as many
    as its time has room for beside the decodes, and a request is admitted where the decodes, when they are longest, do
    not fill a step. Both by a StepCostModel, which is told what each step took, with the spread that it has shown taken
    off the promise.
    """

    def __init__(self, slo: Slo, most: StepPolicy, model: StepCostModel) -> None:
        """`most`: what is never exceeded, however fast steps are."""
        self.most = most
        self.model = model
        self.ttft_s = slo.limits_s.get("ttft")
        self._tpot_s = slo.limits_s.get("tpot", float("inf"))
        self._percentile = slo.percentile

    @property
    def step_limit_s(self) -> float:
        """What a step may be predicted to take while anybody decodes."""
        return self._tpot_s / self.spread

    @property
    def spread(self) -> float:
        """What steps take over what was predicted, in the SLO's share of cases."""
        return self.model.spread(self._percentile)

    def next_step(self, scheduler: "Scheduler") -> StepPolicy:
        """By who runs and who waits as it is now."""
        decoding = [len(one.token_ids) for one in scheduler.running if _num_left(one) == 1]
        prompts = [one for one in scheduler.running if _num_left(one) > 1]
        if not (prompts or scheduler.waiting):
            return msgspec.structs.replace(self.most, drafts=self._drafts(scheduler, decoding))
        if self._tpot_s == float("inf"):
            return msgspec.structs.replace(self.most, drafts=DraftTerms())
        waiting = list(islice(scheduler.waiting, max(0, self.most.max_num_seqs - len(scheduler.running))))
        budget = self.most.max_num_batched_tokens
        if decoding:
            left_s = self.step_limit_s - self.model.cost.step_s(_decodes(decoding))
            chunk = max(LEAST_CHUNK, _chunks_within(self.model.cost, left_s, prompts + waiting, len(decoding)))
            budget = min(budget, len(decoding) + chunk)
        return msgspec.structs.replace(
            self.most,
            max_num_seqs=max(1, len(scheduler.running) + self._admissible(scheduler, waiting)),
            max_num_batched_tokens=budget,
            drafts=DraftTerms(),  # prompts need the time
        )

    def _drafts(self, scheduler: "Scheduler", decoding: Sequence[int]) -> DraftTerms:
        """What is guessed in a step without a prompt, so that it keeps the promise if no guess is right: the step's
        time is that of its decodes, of the guesses that it verifies, and of guessing anew."""
        terms = self.most.drafts
        if self._tpot_s == float("inf") or not terms.num_tokens or not decoding:
            return terms
        cost = self.model.cost
        left_s = self.step_limit_s - cost.step_s(_decodes(decoding))
        num_verified = sum(len(one.draft_token_ids) for one in scheduler.running)
        most = max(terms.num_tokens * len(decoding), num_verified)
        rows_s = cost.rows_more_s(len(decoding), sum(decoding) / len(decoding), most)
        fitting = int(np.searchsorted(rows_s, max(0.0, left_s), side="right")) - 1
        num_tokens, verified_s = min(terms.num_tokens, fitting // len(decoding)), float(rows_s[num_verified])
        return msgspec.structs.replace(terms, num_tokens=num_tokens, most_s=max(0.0, left_s - verified_s))

    def most_decodes(self, context: int) -> int:
        """Sequences of `context` tokens that can decode beside the smallest chunk, at least 1."""
        cost = self.model.cost
        limit_s = self.step_limit_s - _reserve_s(cost)
        batches = range(2, self.most.max_num_seqs + 1)
        return 1 + bisect_right(batches, limit_s, key=lambda batch: cost.step_s(StepShape.decode(batch, context)))

    def _admissible(self, scheduler: "Scheduler", waiting: Sequence[Request]) -> int:
        """How many of the first that wait can join: all that run then, until they have ended, within the limit."""
        found = scheduler.admission.mean_to_come([*scheduler.running, *waiting])
        limit_s, cost, low, high = self.step_limit_s, self.model.cost, 0, len(waiting)
        limit_s -= _reserve_s(cost)
        while low < high:
            middle = (low + high + 1) // 2
            count = len(scheduler.running) + middle
            copies = found.copies[:count]
            tokens, remaining = (np.repeat(part[:count], copies) for part in (found.tokens, found.remaining))
            low, high = (middle, high) if peak_step_s(cost, tokens, remaining) <= limit_s else (low, middle - 1)
        return low


def peak_step_s(cost: StepCost, tokens: np.ndarray, remaining: np.ndarray) -> float:
    """The longest decode step until all have ended, of sequences that have `tokens` and will add `remaining`.

    As with blocks (`admission.peak_blocks`) the peak lies where one of them ends: those with less to go have left.
    """
    ends = np.unique(remaining)[:, None]
    alive = remaining >= ends  # [moments at which one ends, each]
    context = ((tokens + ends) * alive).sum(axis=1)
    count, context_s = alive.sum(axis=1), cost.context_token_s + cost.pair_s
    return cost.fixed_s + float((cost.tokens_s(count) + cost.sequence_s * count + context_s * context).max())


def step_shape(plan: SchedulerOutput) -> StepShape:
    """A draft counts as a sequence more where rows of logits are meant: it is sampled too."""
    context = pairs = drafts = 0
    for item in plan.scheduled:
        new, computed = item.num_scheduled_tokens, item.num_computed_tokens
        context += computed + new
        pairs += new * computed + new * (new + 1) // 2
        drafts += len(item.draft_token_ids)
    return StepShape(plan.num_scheduled_tokens, len(plan.scheduled) + drafts, context, pairs)


def _decodes(contexts: Sequence[int]) -> StepShape:
    return StepShape(len(contexts), len(contexts), sum(contexts), sum(contexts))


def _chunks_within(cost: StepCost, seconds: float, requests: Sequence[Request], beside: int) -> int:
    """Prompt tokens that a step of `beside` decodes computes in `seconds` more, the first request's first. What a
    prefix hit would save those that wait is not known here. A chunk that ends on a block border leaves its last tokens
    to one prompt more."""
    total = 0
    seconds -= cost.sequence_s if len(requests) > 1 else 0.0
    for request in requests:
        computed, wanted = request.num_computed_tokens, _num_left(request)
        tokens = min(cost.tokens_within(seconds, computed, beside + total), wanted)
        seconds -= cost.more_s(StepShape.chunk(tokens, computed), beside + total)
        total += tokens
        if tokens < wanted:
            break
    return total


def _reserve_s(cost: StepCost) -> float:
    """What the smallest chunk adds at most."""
    return max(cost.more_s(StepShape.chunk(LEAST_CHUNK), beside) for beside in (0, *ROW_KNOTS))


def _num_left(request: Request) -> int:
    return request.num_tokens_to_compute - request.num_computed_tokens
