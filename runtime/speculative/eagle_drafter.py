"""EagleDrafter: guesses by EAGLE's layer (`eagle.py`), whose K and V lie in a request's own blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmq.runtime.batch import BatchInputs, RunnerRequest
from llmq.runtime.kv_store import KVStore
from llmq.runtime.programs.base import Program
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest
from llmq.runtime.speculative.guesses import Draft, Guesser
from llmq.runtime.speculative.model_drafter import CATCH_UP_TOKENS
from llmq.runtime.speculative.pass_price import PassPrice


@dataclass
class _Text:
    """What the drafter has of one request. Pair p is the token at position p + 1 and the hidden state at p."""

    num_computed: int  # pairs whose K and V are there, of hidden states of the model's own
    features: Tensor  # hidden states from that pair on, [num_waiting, hidden_size]
    draft: Draft | None = None
    num_slots: int = 0
    is_current: bool = False  # it can be guessed on
    feature: Tensor | None = None  # [hidden_size], what stands for the hidden state at the last position


class EagleDrafter:
    """A pass computes the pairs that are new, of the model's hidden states; the following ones one pair each, of what
    came out of the last. Those pairs are computed again once their tokens are accepted.

    Behind a prefix hit pairs are taken to be there, as a `ModelDrafter`'s tokens.
    """

    name = "an EAGLE head"
    reads_hidden = "all"

    def __init__(self, head: Program, base: Program, store: KVStore, guesser: Guesser) -> None:
        """`head` runs the layer, `base` names words; `store` is of both."""
        self._head, self._base, self._store, self._guesser = head, base, store, guesser
        self._texts: dict[str, _Text] = {}
        self._price = PassPrice()

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    @torch.inference_mode()
    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        texts = [self._follow(item, request) for item, request in zip(items, requests, strict=True)]
        if self._price.is_worth_it(sum(text.draft.count > 0 for text in texts), self._guesser.first_chance, terms):
            current = self._catch_up(texts, terms)
            while current:
                current = self._guess_on(current, terms)
        return [text.draft.worth for text in texts]

    def _follow(self, item: ScheduledRequest, request: RunnerRequest) -> _Text:
        """A request as it is after its step, to be guessed on."""
        rows = request.hidden
        text = self._texts.setdefault(request.request_id, _Text(item.num_computed_tokens, rows[:0]))
        if text.draft is not None:
            self._guesser.learn(text.draft.guess, request.token_ids)
        if text.num_computed + len(text.features) != item.num_computed_tokens:
            text.num_computed, text.features = item.num_computed_tokens, rows[:0]  # what lies between is not known
        text.features = torch.cat([text.features, rows])[-2 * CATCH_UP_TOKENS :]
        known = item.num_computed_tokens + len(rows)
        text.num_computed = known - len(text.features)
        text.num_slots = min(
            len(blocks) * group.block_tokens
            for blocks, group in zip(request.block_ids, self._store.layout.groups, strict=True)
        )
        # The last of `count` guesses comes out of the pair at position known + count - 2.
        text.draft = self._guesser.begin(request, max(0, min(item.max_draft_tokens, text.num_slots - known + 1)))
        text.is_current = item.samples
        return text

    def _catch_up(self, texts: Sequence[_Text], terms: DraftTerms) -> list[_Text]:
        """Compute the pairs that are new, as many as one step allows, and guess where none is left."""
        left, spans = CATCH_UP_TOKENS, []
        for text in texts:
            # The prompt's last pair waits for the token that follows it.
            last = len(text.draft.view.token_ids) - 1 - text.num_computed
            if (num_new := min(left, len(text.features), last)) > 0:
                spans.append((text, num_new))
                left -= num_new
        if not spans:
            return []
        features = torch.cat([text.features[:num_new] for text, num_new in spans])
        hidden = self._pairs(spans, features).split([num_new for _, num_new in spans])
        ready = []
        for (text, num_new), rows in zip(spans, hidden, strict=True):
            text.num_computed += num_new
            text.features = text.features[num_new:]
            if text.is_current and text.draft.count > 0 and not len(text.features):
                text.feature = rows[-1]
                ready.append(text)
        self._name(ready, terms)
        return ready

    def _guess_on(self, texts: Sequence[_Text], terms: DraftTerms) -> list[_Text]:
        """Another guess for those that it is worth for; they are returned."""
        kept = {id(draft) for draft in self._guesser.worth_more([text.draft for text in texts], self._price, terms)}
        more = [text for text in texts if id(text.draft) in kept]
        if more:
            with self._price.timed():
                features = torch.stack([text.feature for text in more])
                hidden = self._pairs([(text, 1) for text in more], features, guessed=True)
                for text, row in zip(more, hidden, strict=True):
                    text.feature = row
                self._name(more, terms)
        return more

    def _pairs(self, spans: Sequence[tuple[_Text, int]], features: Tensor, *, guessed: bool = False) -> Tensor:
        """What comes out of the next pairs of each text, [num_pairs, hidden_size]."""
        steps, views = [], []
        for text, num_new in spans:
            view = text.draft.view
            behind = len(text.draft.guess.token_ids) - 1 if guessed else 0
            steps.append(
                ScheduledRequest(
                    request_id=view.request_id,
                    num_computed_tokens=text.num_computed + behind,
                    num_scheduled_tokens=num_new,
                    samples=True,
                )
            )
            views.append(view.shifted())
        inputs = BatchInputs.build(steps, views, self._store.layout, self._store.device)
        return self._head.forward(replace(inputs, output_rows=None, features=features))

    def _name(self, texts: Sequence[_Text], terms: DraftTerms) -> None:
        if texts:
            logits = self._base.logits(torch.stack([text.feature for text in texts]))
            self._guesser.add(logits, [text.draft for text in texts], terms)
