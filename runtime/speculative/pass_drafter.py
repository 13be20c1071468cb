"""PassDrafter: what drafters with layers of their own have in common."""

import time
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

# What a drafter reads at most in a step beside the model's own, of prompts and of texts that it has not followed.
CATCH_UP_TOKENS = 512


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

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    @torch.inference_mode()
    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        texts = [self._follow(item, request) for item, request in zip(items, requests, strict=True)]
        if self._price.is_worth_it(sum(text.draft.count > 0 for text in texts), self._guesser.first_chance, terms):
            # Of what is complete and not guessed on, as a beam, nothing is needed.
            followed = [t for t, item in zip(texts, items, strict=True) if item.max_draft_tokens or not item.samples]
            began_s = time.perf_counter()
            known = sum(text.num_computed for text in followed)
            most = self._price.tokens_within(terms.most_s, CATCH_UP_TOKENS)
            current = self._catch_up(followed, most, terms)
            took_s = time.perf_counter() - began_s
            self._price.observe(sum(text.num_computed for text in followed) - known, took_s)
            while current := self._worth_more(current, terms):
                if not self._price.fits(terms.most_s - (time.perf_counter() - began_s)):
                    break
                with self._price.timed():
                    self._guess(current, terms)
        return [text.draft.worth for text in texts]

    @abstractmethod
    def _follow(self, item: ScheduledRequest, request: RunnerRequest) -> Text:
        """A request as it is after its step, with a draft to be filled."""

    @abstractmethod
    def _catch_up(self, texts: Sequence[Text], most_tokens: int, terms: DraftTerms) -> list[Text]:
        """Compute what is new of each text, `most_tokens` in all. Returned: whom that completes, with a guess."""

    @abstractmethod
    def _guess(self, texts: Sequence[Text], terms: DraftTerms) -> None:
        """Another guess for each."""

    def _worth_more(self, texts: Sequence[Text], terms: DraftTerms) -> list[Text]:
        kept = {id(draft) for draft in self._guesser.worth_more([text.draft for text in texts], self._price, terms)}
        return [text for text in texts if id(text.draft) in kept]

    def _num_slots(self, request: RunnerRequest) -> int:
        pairs = zip(request.block_ids, self._layout.groups, strict=True)
        return min(len(ids) * group.block_tokens for ids, group in pairs)
