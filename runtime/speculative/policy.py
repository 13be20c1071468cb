"""DraftPolicy: how much is guessed, from what a step costs and from what guesses have brought."""

from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from llmq.profiles.step_cost import StepCostModel, StepShape
from llmq.runtime.policy import StepPolicy
from llmq.runtime.scheduler_output import DraftTerms

if TYPE_CHECKING:
    from llmq.runtime.scheduler import Scheduler

_FORGET = 1 / 16  # weight of a step in the running means


class DraftPolicy:
    """A draft is worth verifying where its chance, times a token, repays the time of its row.

    A step of B decoding requests that verifies drafts gives them G tokens in S seconds. One more row takes r seconds
    and gives a token with chance p: the tokens a second rise where p / r > G / S. So `least_chance` = r · G / S, which
    for G and S as they come out is the fixed point of Dinkelbach's method (1967) for the largest G / S. As long as a
    step mostly reads weights, r is small against S / B and a poor guess is worth it; once its arithmetic is the limit,
    S grows to B · r, `least_chance` to 1, and speculation has turned itself off.
    """

    def __init__(self, num_draft_tokens: int, model: StepCostModel) -> None:
        """`num_draft_tokens`: at most, for a request."""
        self.num_draft_tokens = num_draft_tokens
        self._model = model
        self._given = 1.0  # tokens a request and step, running mean,
        self._drafted = 0.0  # and drafts verified for it
        self._draft_s = 0.0  # what guessing took of a step
        self._seen = (0, 0)

    def next_step(self, policy: StepPolicy, scheduler: "Scheduler") -> StepPolicy:
        """`policy` with drafts, at most its own. What a step guesses the next one verifies: for whoever runs now, or is
        about to."""
        self._follow(scheduler, sum(one.num_tokens - one.num_computed_tokens == 1 for one in scheduler.running))
        if not policy.drafts.num_tokens:
            return policy
        running = scheduler.running or islice(scheduler.waiting, policy.max_num_seqs)
        terms, limit = self.terms([one.num_tokens for one in running]), policy.drafts
        terms = msgspec.structs.replace(terms, num_tokens=min(terms.num_tokens, limit.num_tokens), most_s=limit.most_s)
        return msgspec.structs.replace(policy, drafts=terms)

    def terms(self, contexts: list[int]) -> DraftTerms:
        """Where sequences of `contexts` tokens, one at least, decode at once."""
        cost, batch, total = self._model.cost, len(contexts), sum(contexts)
        row_s = cost.token_s + cost.sequence_s + cost.pair_s * total / batch
        step_s = cost.step_s(StepShape(batch, batch, total, total)) + row_s * self._drafted * batch + self._draft_s
        token_s = step_s / (batch * self._given)
        return DraftTerms(num_tokens=self.num_draft_tokens, least_chance=row_s / token_s, token_s=token_s)

    def observe(self, draft_s: float) -> None:
        """In a step guessing took `draft_s`."""
        self._draft_s += _FORGET * (draft_s - self._draft_s)

    def _follow(self, scheduler: "Scheduler", num_decoding: int) -> None:
        counted = (scheduler.num_draft_tokens, scheduler.num_accepted_tokens)
        drafted, accepted = (now - before for now, before in zip(counted, self._seen, strict=True))
        self._seen = counted
        if num_decoding:
            self._drafted += _FORGET * (drafted / num_decoding - self._drafted)
            self._given += _FORGET * (1.0 + accepted / num_decoding - self._given)
