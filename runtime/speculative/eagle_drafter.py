"""EagleDrafter: guesses by EAGLE's layer (`eagle.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.scheduler_output import ScheduledRequest
from llmq.runtime.speculative import pass_drafter
from llmq.runtime.speculative.draft_pass import Span
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

    def _catch_up(self, texts: Sequence[_Text], most_tokens: int) -> list[_Text]:
        left, spans = most_tokens, []
        for text in texts:
            # The last pair of a prompt waits for the token that follows it.
            last = len(text.draft.view.token_ids) - 1 - text.num_computed
            if (num_new := min(left, len(text.features), last)) > 0:
                spans.append((text, num_new))
                left -= num_new
        if not spans:
            return []
        features = torch.cat([text.features[:num_new] for text, num_new in spans])
        ready, places = [], []
        for text, num_new in spans:
            is_ready = text.is_complete and text.draft.count > 0 and num_new == len(text.features)
            ready += [text] if is_ready else []
            places.append((text, text.num_computed, num_new, is_ready))
            text.num_computed += num_new
            text.features = text.features[num_new:]
        self._pairs(places, features)
        return ready

    def _guess(self, texts: Sequence[_Text]) -> None:
        places = [(text, text.num_computed + len(text.draft.guess.token_ids) - 1, 1, True) for text in texts]
        self._pairs(places, torch.stack([text.last for text in texts]))

    def _pairs(self, places: Sequence[tuple[_Text, int, int, bool]], features: Tensor) -> None:
        """Compute so many pairs of each text from a position on, and add a guess where the last one is to bring it."""
        spans = [
            Span(text.draft.view, start, text.draft.view.token_ids[start + 1 : start + 1 + num_pairs], is_named)
            for text, start, num_pairs, is_named in places
        ]
        hidden, logits = self._passes.run(spans, features)
        for (text, _, _, _), rows in zip(places, hidden.split([count for _, _, count, _ in places]), strict=True):
            text.last = rows[-1]
        if named := [text.draft for text, _, _, is_named in places if is_named]:
            self._guesser.add(logits, named)
