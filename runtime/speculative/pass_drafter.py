"""PassDrafter: what drafters with layers of their own have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from llmq.profiles.kv_spec import KVCacheLayout
from llmq.runtime.batch import RunnerRequest
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest
from llmq.runtime.speculative.draft_pass import DraftPasses
from llmq.runtime.speculative.guesses import Draft, Guesser
from llmq.runtime.speculative.pass_price import PassPrice
from llmq.runtime.speculative.worth import TRIED_FOR, gain_of

# What a drafter reads at most in a step beside the model's own, of prompts and of texts that it has not followed.
CATCH_UP_TOKENS = 512
_USUAL_ANSWER = 128.0  # tokens, until it is known of this server's


@dataclass
class Followed:
    """A request as its drafter knows it."""

    num_computed: int  # positions whose K and V are in the drafter's layers
    num_slots: int = 0  # for them, from position 0 on
    draft: Draft | None = None


Text = TypeVar("Text", bound=Followed)


@dataclass(frozen=True)
class _FirstOnes:
    """The first `count` of some texts, were they guessed on."""

    count: int
    gained_s: float  # in a step
    total_s: float  # until their ends, but for reading them until here
    tried_s: float  # of reading them until here, and a guess


class PassDrafter(ABC, Generic[Text]):
    """Its layers keep K and V in the blocks of the requests themselves, behind the model's: one block table, one prefix
    cache, one admission. After a step it computes what is new of the texts, then a guess at a time for all of them.

    Its K and V behind a prefix hit are taken to be there: where they are not, guesses are worse and no text changes.
    """

    num_pooled = 0
    computes = True

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

    def end_trial(self) -> None:
        self._guesser.unlearn()
        self._mean_answer = _USUAL_ANSWER

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
            current = self._catch_up(followed, self._price.tokens_within(terms.most_s, CATCH_UP_TOKENS))
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
        nearly read. Where that is nobody, and it may be by the most that is known, some are tried: as many as teach
        most for their time."""
        order, guesser = sorted(texts, key=self._num_behind), self._guesser
        worth = self._first_ones(order, guesser.first_chance, terms)
        if worth:
            return order[: max(worth, key=lambda first: first.total_s).count]
        order = [text for text in order if text.draft.count > 0]
        least_s = TRIED_FOR * terms.prices.plain_s
        hoped = [one for one in self._first_ones(order, guesser.hoped_chance, terms) if one.gained_s > least_s]
        if not hoped:
            guesser.wait()
            self._price.wait()
            return []
        return order[: min(hoped, key=lambda first: first.tried_s / first.count).count]

    def _first_ones(self, texts: Sequence[Text], chance: float, terms: DraftTerms) -> list["_FirstOnes"]:
        """Those numbers of `texts` that gain if a guess is right with `chance`, where a guess is within what may be
        lost."""
        found, num_behind, to_come = [], 0, 0.0
        for count, text in enumerate(texts, 1):
            num_behind += self._num_behind(text)
            to_come += self._num_to_come(text)
            if self._price.measured_s(num_behind + count) > terms.prices.spare_s:
                break
            tried_s = self._price.seconds(num_behind + count)
            behind_s = tried_s - self._price.seconds(count)
            gain = gain_of(count, chance, self._price, terms)
            total_s = gain.gained_s / count * to_come / gain.given - behind_s
            if gain.gained_s > 0.0 and total_s > 0.0:
                found.append(_FirstOnes(count, gain.gained_s, total_s, tried_s))
        return found

    def _num_behind(self, text: Text) -> int:
        """Tokens that it has not read, but for the one that every guess begins with."""
        return max(0, len(text.draft.view.token_ids) - text.num_computed - 1)

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
