"""PassDrafter: what drafters with layers of their own have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from llmq.profiles.kv_spec import KVCacheLayout
from llmq.runtime.batch import RunnerRequest
from llmq.runtime.scheduler_output import DraftPrices, DraftTerms, ScheduledRequest
from llmq.runtime.speculative.draft_pass import DraftPasses
from llmq.runtime.speculative.guesses import Draft, Guesser
from llmq.runtime.speculative.pass_price import PassPrice
from llmq.runtime.speculative.worth import gain_of

# What a drafter reads at most in a step beside the model's own, of prompts and of texts that it has not followed.
CATCH_UP_TOKENS = 512
FIRST_TOKENS = 32  # of the first pass, which tells what one takes
_USUAL_ANSWER = 128.0  # tokens, until it is known of this server's


@dataclass
class Followed:
    """A request as its drafter knows it."""

    num_computed: int  # positions whose K and V are in the drafter's layers
    num_slots: int = 0  # for them, from position 0 on
    draft: Draft | None = None


Text = TypeVar("Text", bound=Followed)


class PassDrafter(ABC, Generic[Text]):
    """Its layers keep K and V in the blocks of the requests themselves, behind the model's: one block table, one prefix
    cache, one admission. After a step it computes what is new of the texts, then a guess at a time for all of them.

    Its K and V behind a prefix hit are taken to be there: where they are not, guesses are worse and no text changes.
    """

    num_pooled = 0

    def __init__(self, passes: DraftPasses, layout: KVCacheLayout, guesser: Guesser) -> None:
        """`passes` computes its layers; `layout`: of the KVStore, which is the model's and the drafter's."""
        self._passes, self._layout, self._guesser, self._price = passes, layout, guesser, PassPrice()
        self._texts: dict[str, Text] = {}
        self._mean_answer = _USUAL_ANSWER

    def forget(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None and text.draft is not None:
            made = len(text.draft.view.token_ids) - text.draft.view.num_prompt_tokens
            self._mean_answer += (made - self._mean_answer) / 16

    @torch.inference_mode()
    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        texts = [self._follow(item, request) for item, request in zip(items, requests, strict=True)]
        # Of what is complete and not guessed on, as a beam, nothing is needed.
        followed = [t for t, item in zip(texts, items, strict=True) if item.max_draft_tokens or not item.samples]
        if terms.prices is not None:
            followed = self._worth_following(followed, terms)
        began_s, spent_s = self._price.clock(), 0.0
        if followed:
            known = sum(text.num_computed for text in followed)
            is_first = terms.prices is not None and not self._price.is_known
            most = self._price.tokens_within(terms.most_s, FIRST_TOKENS if is_first else CATCH_UP_TOKENS)
            current = self._catch_up(followed, most)
            spent_s = self._price.clock() - began_s
            self._price.observe(sum(text.num_computed for text in followed) - known, spent_s)
            while current := self._worth_more(current, terms, spent_s):
                if not self._price.fits(len(current), terms.most_s - spent_s):
                    break
                with self._price.timed(len(current)):
                    self._guess(current)
                spent_s = self._price.clock() - began_s
        return self._guesser.keep_worth([text.draft for text in texts], terms, spent_s)

    def _worth_following(self, texts: Sequence[Text], terms: DraftTerms) -> Sequence[Text]:
        """Of whom guesses are worth their passes and rows, and what it takes to read the text until here: by the least
        that is known of their chance, over the tokens that are still to come. The most of them, those first that are
        nearly read. Where that is nobody, one of them on trial, as long as guesses may be worth it by what is known."""
        prices, guesser, order = terms.prices, self._guesser, sorted(texts, key=self._num_behind)
        best_s, best, behind_s, to_come = 0.0, 0, 0.0, 0.0
        for count, text in enumerate(order, 1):
            behind_s += self._behind_s(text, prices)
            to_come += self._num_to_come(text)
            gain = gain_of(count, guesser.first_chance, self._price, terms)
            if behind_s + gain.cost_s > prices.spare_s:
                break
            total_s = gain.gained_s / count * to_come / gain.given - behind_s
            if gain.gained_s > 0.0 and total_s > best_s:
                best_s, best = total_s, count
        if best:
            return order[:best]
        guessed = [text for text in order if text.draft.count > 0]
        sizes = {1, len(guessed) // 2, len(guessed)} - {0} if guessed else set()
        if any(gain_of(count, guesser.hoped_chance, self._price, terms).gained_s > 0.0 for count in sizes):
            cost_s = self._price.seconds(1) + self._behind_s(guessed[0], prices)
            if not self._price.is_known:  # a pass of the model itself would be no dearer
                cost_s = prices.plain_s + FIRST_TOKENS * (prices.rows_s[-1] - prices.rows_s[-2])
            if cost_s <= prices.spare_s:
                return guessed[:1]
        else:
            guesser.wait()
        return []

    def _num_behind(self, text: Text) -> int:
        """Tokens that it has not read, but for the one that every guess begins with."""
        return max(0, len(text.draft.view.token_ids) - text.num_computed - 1)

    def _behind_s(self, text: Text, prices: DraftPrices) -> float:
        behind = self._num_behind(text)
        if not self._price.is_known:
            return float("inf")  # it is tried with a few tokens first
        return self._price.seconds(behind) - self._price.seconds(0)

    def _num_to_come(self, text: Text) -> float:
        view = text.draft.view
        made = len(view.token_ids) - view.num_prompt_tokens
        return min(max(0, view.params.max_tokens - made), self._mean_answer)

    @abstractmethod
    def _follow(self, item: ScheduledRequest, request: RunnerRequest) -> Text:
        """A request as it is after its step, with a draft to be filled."""

    @abstractmethod
    def _catch_up(self, texts: Sequence[Text], most_tokens: int) -> list[Text]:
        """Compute what is new of each text, `most_tokens` in all. Returned: whom that completes, with a guess."""

    @abstractmethod
    def _guess(self, texts: Sequence[Text]) -> None:
        """Another guess for each."""

    def _worth_more(self, texts: Sequence[Text], terms: DraftTerms, spent_s: float) -> list[Text]:
        drafts = [text.draft for text in texts]
        kept = {id(draft) for draft in self._guesser.worth_more(drafts, self._price, terms, spent_s)}
        return [text for text in texts if id(text.draft) in kept]

    def _num_slots(self, request: RunnerRequest) -> int:
        pairs = zip(request.block_ids, self._layout.groups, strict=True)
        return min(len(ids) * group.block_tokens for ids, group in pairs)
