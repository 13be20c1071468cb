"""DraftPolicy: how much is guessed, from what a step costs and from what guesses have brought."""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from llmq.profiles.step_cost import StepCostModel, StepShape
from llmq.runtime.policy import StepPolicy
from llmq.runtime.request import Request
from llmq.runtime.scheduler_output import DraftPrices, DraftTerms
from llmq.runtime.speculative.account import TimeAccount

if TYPE_CHECKING:
    from llmq.runtime.scheduler import Scheduler

_FORGET = 1 / 16  # weight of a step in the running means
MOST_ROWS = 256  # that are verified in a step


class DraftPolicy:
    """A draft is worth verifying where its chance, times what a token is worth, repays the time of its row.

    A step of B decoding requests that verifies drafts gives them G tokens in S seconds. A row more takes r seconds and
    gives a token with chance p: the tokens a second rise where p · S / G > r, and S / G as it comes out is the fixed
    point of Dinkelbach's method (1967) for the largest G / S. As long as a step mostly reads weights r is small and a
    poor guess is worth it; once its arithmetic is the limit, S / G is r, and speculation has turned itself off.

    What a row adds to a step is the StepCostModel's to say, for each number of rows. What all this comes to is booked
    in a TimeAccount, from which wrong guesses are paid.
    """

    def __init__(self, num_draft_tokens: int, model: StepCostModel) -> None:
        """`num_draft_tokens`: at most, for a request."""
        self.num_draft_tokens = num_draft_tokens
        self.account = TimeAccount()
        self._model = model
        self._given = 1.0  # tokens a request and step, running mean,
        self._drafted = 0.0  # and drafts verified for it
        self._draft_s = 0.0  # what guessing took of a step
        self._guessing_s = 0.0  # since it was last booked
        self._prices: DraftPrices | None = None  # at which the last step was computed
        self._batch = 0  # that it decoded
        self._seen = (0, 0)

    def next_step(self, policy: StepPolicy, scheduler: "Scheduler") -> StepPolicy:
        """`policy` with drafts, at most its own. What a step guesses the next one verifies: for whoever runs now, or is
        about to."""
        self._follow(scheduler)
        decoding = [one.num_tokens for one in scheduler.running if _num_left(one) == 1]
        self._batch = len(decoding)
        waiting = list(islice(scheduler.waiting, max(0, policy.max_num_seqs - len(scheduler.running))))
        beside = sum(_num_left(one) for one in (*scheduler.running, *waiting)) - len(decoding)
        contexts = decoding or [one.num_tokens for one in scheduler.running or waiting]
        if not contexts:
            return policy
        terms = self.terms(contexts, min(beside, policy.max_num_batched_tokens) if decoding else 0)
        self._prices, limit = terms.prices, policy.drafts
        terms = msgspec.structs.replace(terms, num_tokens=min(terms.num_tokens, limit.num_tokens), most_s=limit.most_s)
        return msgspec.structs.replace(policy, drafts=terms if limit.num_tokens else limit)

    def terms(self, contexts: Sequence[int], beside: int = 0) -> DraftTerms:
        """Where sequences of `contexts` tokens, one at least, decode at once, with so many tokens of prompts."""
        cost, batch, total = self._model.cost, len(contexts), sum(contexts)
        most = min(MOST_ROWS, batch * self.num_draft_tokens)
        rows_s = cost.rows_more_s(batch, total / batch, most)
        plain_s = cost.step_s(StepShape(batch, batch, total, total))
        step_s = plain_s + float(rows_s[min(most, round(self._drafted * batch))]) + self._draft_s
        if beside:
            rows_s = cost.rows_more_s(batch + beside, total / batch, most)
        prices = DraftPrices(
            token_s=min(plain_s, step_s / self._given) / batch,  # it is to be faster than without guesses too
            rows_s=tuple(rows_s.tolist()),
            plain_s=plain_s,
            spare_s=self.account.spare_s(plain_s),
        )
        return DraftTerms(num_tokens=self.num_draft_tokens, prices=prices)

    def observe(self, draft_s: float) -> None:
        """In a step guessing took `draft_s`."""
        self._draft_s += _FORGET * (draft_s - self._draft_s)
        self._guessing_s += draft_s

    def _follow(self, scheduler: "Scheduler") -> None:
        """Book the step before."""
        counted = (scheduler.num_draft_tokens, scheduler.num_accepted_tokens)
        drafted, accepted = (now - before for now, before in zip(counted, self._seen, strict=True))
        self._seen = counted
        if self._prices is None:
            return
        rows_s, plain_s, batch = self._prices.rows_s, self._prices.plain_s, max(1, self._batch)
        verified_s = rows_s[min(drafted, len(rows_s) - 1)]
        saved_s, guessing_s, self._guessing_s = accepted * plain_s / batch, self._guessing_s, 0.0
        self.account.book(plain_s, saved_s=saved_s, guessing_s=guessing_s, rows_s=verified_s)
        if self._batch:
            self._drafted += _FORGET * (drafted / batch - self._drafted)
            self._given += _FORGET * (1.0 + accepted / batch - self._given)


def _num_left(request: Request) -> int:
    return request.num_tokens_to_compute - request.num_computed_tokens
