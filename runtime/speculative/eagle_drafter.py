"""EagleDrafter: guesses by EAGLE's layer (`eagle.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from llmq.runtime.batch import BatchInputs, RunnerRequest
from llmq.runtime.kv_store import KVStore
from llmq.runtime.programs.base import Program
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest
from llmq.runtime.speculative import pass_drafter
from llmq.runtime.speculative.guesses import Guesser
from llmq.runtime.speculative.pass_drafter import Followed, PassDrafter


@dataclass
class _Text(Followed):
    """Position p is that of a pair: the token at p + 1 and the hidden state at p. Those computed are of the model's own
    hidden states; `features` are those of the next pairs, [num_waiting, hidden_size]."""

    features: Tensor = field(default_factory=lambda: torch.empty(0))
    is_complete: bool = False  # a token was sampled from the last of `features`
    last: Tensor | None = None  # [hidden_size], what stands for the hidden state of the last position


class EagleDrafter(PassDrafter[_Text]):
    """A pass computes the pairs that are new, of the model's hidden states; then one pair each, of what came out of the
    last. Those are computed again once their tokens are accepted."""

    name = "an EAGLE head"
    reads_hidden = "all"

    def __init__(self, head: Program, base: Program, store: KVStore, guesser: Guesser) -> None:
        """`head` runs the layer over `store`, `base` names words."""
        super().__init__(store, guesser)
        self._head, self._base = head, base

    def _follow(self, item: ScheduledRequest, request: RunnerRequest) -> _Text:
        rows, computed = request.hidden, item.num_computed_tokens
        text = self._texts.setdefault(request.request_id, _Text(computed, features=rows[:0]))
        if text.draft is not None:
            self._guesser.learn(text.draft.guess, request.token_ids)
        if text.num_computed + len(text.features) != computed:
            text.features = rows[:0]  # what lies between was not seen
        text.features = torch.cat([text.features, rows])[-2 * pass_drafter.CATCH_UP_TOKENS :]
        known = computed + len(rows)
        text.num_computed = known - len(text.features)
        text.num_slots, text.is_complete = self._num_slots(request), item.samples
        # The last of `count` guesses comes out of the pair at position known + count - 2.
        text.draft = self._guesser.begin(request, max(0, min(item.max_draft_tokens, text.num_slots - known + 1)))
        return text

    def _catch_up(self, texts: Sequence[_Text], terms: DraftTerms) -> list[_Text]:
        left, spans = pass_drafter.CATCH_UP_TOKENS, []
        for text in texts:
            # The last pair of a prompt waits for the token that follows it.
            last = len(text.draft.view.token_ids) - 1 - text.num_computed
            if (num_new := min(left, len(text.features), last)) > 0:
                spans.append((text, num_new))
                left -= num_new
        if not spans:
            return []
        features = torch.cat([text.features[:num_new] for text, num_new in spans])
        hidden = self._pairs([(text, text.num_computed, num_new) for text, num_new in spans], features)
        ready = []
        for (text, num_new), rows in zip(spans, hidden.split([num_new for _, num_new in spans]), strict=True):
            text.num_computed += num_new
            text.features = text.features[num_new:]
            if text.is_complete and text.draft.count > 0 and not len(text.features):
                text.last = rows[-1]
                ready.append(text)
        self._name(ready, terms)
        return ready

    def _guess(self, texts: Sequence[_Text], terms: DraftTerms) -> None:
        places = [(text, text.num_computed + len(text.draft.guess.token_ids) - 1, 1) for text in texts]
        for text, row in zip(texts, self._pairs(places, torch.stack([text.last for text in texts])), strict=True):
            text.last = row
        self._name(texts, terms)

    def _pairs(self, places: Sequence[tuple[_Text, int, int]], features: Tensor) -> Tensor:
        """What comes out of so many pairs of each text from a position on, [num_pairs, hidden_size]."""
        steps = [
            ScheduledRequest(
                request_id=text.draft.view.request_id,
                num_computed_tokens=position,
                num_scheduled_tokens=num_pairs,
                samples=False,
            )
            for text, position, num_pairs in places
        ]
        views = [text.draft.view.shifted() for text, _, _ in places]
        inputs = BatchInputs.build(steps, views, self._store.layout, self._store.device)
        return self._head.forward(replace(inputs, output_rows=None, features=features))

    def _name(self, texts: Sequence[_Text], terms: DraftTerms) -> None:
        if texts:
            logits = self._base.logits(torch.stack([text.last for text in texts]))
            self._guesser.add(logits, [text.draft for text in texts], terms)
