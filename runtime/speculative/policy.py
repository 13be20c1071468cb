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
_FADE = 1 / 64  # of what steps without guesses have told, for each that has some
# Of a step: by so much a longer or shorter one is believed to have been so for its guesses, or by what they were to
# take. The rest is the machine.
MOST_NOISE = 0.5
PRICED_STEPS = 8  # for which prices hold: what they are made of moves slowly, and making them takes a tenth of a ms


class DraftPolicy:
    """A draft is worth verifying where its chance, times what a token is worth, repays the time of its row.

    A step of B decoding requests that verifies drafts gives them G tokens in S seconds. A row more takes r seconds and
    gives a token with chance p: the tokens a second rise where p · S / G > r, and S / G as it comes out is the fixed
    point of Dinkelbach's method (1967) for the largest G / S. As long as a step mostly reads weights r is small and a
    poor guess is worth it; once its arithmetic is the limit, S / G is r, and speculation has turned itself off.

    What a row adds to a step is the StepCostModel's to say, for each number of rows. Where it is a little wrong of a
    step without guesses, those that were seen lately put it right. What all this comes to is booked in a TimeAccount,
    by what steps took, and from it wrong guesses are paid.
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
        self._priced_for, self._num_priced = (0, 0), 0  # sequences and tokens beside them, and for how many steps
        self._step_s: float | None = None  # what the last step took, where it decoded only
        self._plain_ratio = 1.0  # what steps without guesses take over what the model says, running mean
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
        prices = self._prices = self._prices_now(
            contexts, min(beside, policy.max_num_batched_tokens) if decoding else 0
        )
        limit = policy.drafts
        num_tokens = min(self.num_draft_tokens, limit.num_tokens)
        terms = DraftTerms(num_tokens=num_tokens, prices=prices, most_s=limit.most_s)
        return msgspec.structs.replace(policy, drafts=terms if limit.num_tokens else limit)

    def _prices_now(self, contexts: Sequence[int], beside: int) -> DraftPrices:
        """Those that were made a few steps ago, for as many sequences and tokens, but for what may be lost."""
        made = (len(contexts), beside)
        self._num_priced += 1
        if made != self._priced_for or self._num_priced == PRICED_STEPS:
            self._priced_for, self._num_priced = made, 0
            return self.prices(contexts, beside)
        return msgspec.structs.replace(self._prices, spare_s=self.account.spare_s(self._prices.plain_s))

    def prices(self, contexts: Sequence[int], beside: int = 0) -> DraftPrices:
        """Where sequences of `contexts` tokens, one at least, decode at once, with so many tokens of prompts."""
        cost, batch, total = self._model.cost, len(contexts), sum(contexts)
        most = min(MOST_ROWS, batch * self.num_draft_tokens)
        rows_s = cost.rows_more_s(batch, total / batch, most)
        plain_s = self._plain_ratio * cost.step_s(StepShape(batch, batch, total, total))
        step_s = plain_s + float(rows_s[min(most, round(self._drafted * batch))]) + self._draft_s
        if beside:
            rows_s = cost.rows_more_s(batch + beside, total / batch, most)
        return DraftPrices(
            token_s=min(plain_s, step_s / self._given) / batch,  # it is to be faster than without guesses too
            rows_s=tuple(rows_s.tolist()),
            plain_s=plain_s,
            spare_s=self.account.spare_s(plain_s),
        )

    def observe(self, step_s: float, draft_s: float) -> None:
        """A step took `step_s`, and guessing for the next one `draft_s` more."""
        self._step_s = step_s if self._priced_for == (self._batch, 0) else None
        self._draft_s += _FORGET * (draft_s - self._draft_s)
        self._guessing_s += draft_s

    def _follow(self, scheduler: "Scheduler") -> None:
        """Book the step before."""
        counted = (scheduler.num_draft_tokens, scheduler.num_accepted_tokens)
        drafted, accepted = (now - before for now, before in zip(counted, self._seen, strict=True))
        self._seen = counted
        if self._prices is None:
            return
        plain_s, batch = self._prices.plain_s, max(1, self._batch)
        saved_s, guessing_s, self._guessing_s = accepted * plain_s / batch, self._guessing_s, 0.0
        self.account.book(plain_s, saved_s=saved_s, guessing_s=guessing_s, rows_s=self._verified_s(drafted))
        if self._batch:
            self._drafted += _FORGET * (drafted / batch - self._drafted)
            self._given += _FORGET * (1.0 + accepted / batch - self._given)

    def _verified_s(self, drafted: int) -> float:
        """What so many guesses added to the step before: what it took more than without, as far as that may be so."""
        rows_s, plain_s = self._prices.rows_s, self._prices.plain_s
        expected_s = rows_s[min(drafted, len(rows_s) - 1)]
        if drafted:
            self._plain_ratio += _FADE * (1.0 - self._plain_ratio)
        if self._step_s is None:
            return expected_s
        off_s, most_s = self._step_s - plain_s - expected_s, max(MOST_NOISE * plain_s, expected_s)
        off_s = min(max(off_s, -most_s), most_s)
        if drafted:
            return max(0.0, expected_s + off_s)
        self._plain_ratio *= 1.0 + _FORGET * off_s / plain_s
        return 0.0


def _num_left(request: Request) -> int:
    return request.num_tokens_to_compute - request.num_computed_tokens
