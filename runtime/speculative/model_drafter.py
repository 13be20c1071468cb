"""ModelDrafter: a smaller decoder of the same words says what it would say. Its first layers may be that decoder.

Drafting by the first layers of the model itself: Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710), and Zhang et al.
2023, Draft & Verify (arXiv 2309.08168).
"""

from collections.abc import Sequence

from llmq.profiles.kv_spec import KVCacheLayout
from llmq.runtime.batch import RunnerRequest
from llmq.runtime.scheduler_output import ScheduledRequest
from llmq.runtime.speculative.draft_pass import DraftPasses, Span
from llmq.runtime.speculative.guesses import Guess, Guesser
from llmq.runtime.speculative.pass_drafter import Followed, PassDrafter


class ModelDrafter(PassDrafter[Followed]):
    reads_hidden = "nothing"

    def __init__(self, passes: DraftPasses, layout: KVCacheLayout, guesser: Guesser) -> None:
        super().__init__(passes, layout, guesser)
        self.name = f"a model by {passes.name}"

    def _follow(self, item: ScheduledRequest, request: RunnerRequest) -> Followed:
        text = self._texts.setdefault(request.request_id, Followed(item.num_computed_tokens))
        guess = Guess() if text.draft is None else text.draft.guess
        right = self._guesser.learn(guess, request.token_ids)
        if right < len(guess.token_ids):
            text.num_computed = min(text.num_computed, guess.at + right)  # from there K and V are another word's
        # One is left to compute: the next guess follows from it.
        text.num_computed = min(text.num_computed, len(request.token_ids) - 1)
        text.num_slots = self._num_slots(request)
        end = len(request.token_ids) if item.samples else item.num_computed_tokens + item.num_scheduled_tokens
        # The last guess is not computed: it needs no slot.
        count = max(0, min(item.max_draft_tokens, text.num_slots - end + 1))
        text.draft = self._guesser.begin(request, count, request.token_ids[:end])
        return text

    def _catch_up(self, texts: Sequence[Followed], most_tokens: int) -> list[Followed]:
        left, spans, ready = most_tokens, [], []
        for text in texts:
            known = len(text.draft.view.token_ids)
            num_new = min(left, min(text.num_slots, known) - text.num_computed)
            if num_new <= 0:
                continue
            spans.append((text, num_new))
            left -= num_new
            if text.draft.count > 0 and text.num_computed + num_new == known:
                ready.append(text)
        self._extend(spans, ready)
        return ready

    def _guess(self, texts: Sequence[Followed]) -> None:
        self._extend([(text, 1) for text in texts], texts)

    def _extend(self, spans: Sequence[tuple[Followed, int]], guessed: Sequence[Followed]) -> None:
        """Compute the next tokens of texts, and add a guess to those in `guessed`, whose last token is among them."""
        if not spans:
            return
        wanted, computed = {id(text) for text in guessed}, []
        for text, num_new in spans:
            view, start = text.draft.view, text.num_computed
            computed.append(Span(view, start, view.token_ids[start : start + num_new], id(text) in wanted))
            text.num_computed += num_new
        _, logits = self._passes.run(computed)
        if guessed:
            self._guesser.add(logits, [text.draft for text in guessed])


class FirstLayersDrafter(ModelDrafter):
    """The first layers of the model itself, with its final norm and head.

    Their K and V of a text are those that the model has computed, so there is nothing to catch up with, and no block
    more. Those of the last token and of guesses go to the slots where the next step writes them again before it reads
    any: what drafting leaves there is never attended to by the model, nor in a block that the prefix cache knows.
    """

    def __init__(self, passes: DraftPasses, layout: KVCacheLayout, guesser: Guesser, num_layers: int) -> None:
        """`passes` computes the first `num_layers` layers of the model."""
        super().__init__(passes, layout, guesser)
        self.name = f"its first {num_layers} layers by {passes.name}"

    def _follow(self, item: ScheduledRequest, request: RunnerRequest) -> Followed:
        text = super()._follow(item, request)
        text.num_computed = len(text.draft.view.token_ids) - (1 if item.samples else 0)
        return text
