"""ModelDrafter: a smaller decoder of the same words says what it would say."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmq.runtime.batch import BatchInputs, RunnerRequest
from llmq.runtime.kv_store import KVStore
from llmq.runtime.programs.base import Program
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest
from llmq.runtime.speculative.guesses import Draft, Guess, Guesser
from llmq.runtime.speculative.pass_price import PassPrice

# What it reads at most in a step beside the model's own, of prompts and of texts that it has not followed.
CATCH_UP_TOKENS = 512


@dataclass
class _Text:
    """What the drafter has of one request."""

    num_computed: int  # tokens whose K and V are in its layers
    num_slots: int = 0  # for them, from position 0 on
    draft: Draft | None = None


class ModelDrafter:
    """Its layers keep K and V in the blocks of the requests themselves, behind the model's: one block table, one prefix
    cache, one admission. After a step it computes what is new of the texts, then a guess at a time for all of them.

    Its K and V behind a prefix hit are taken to be there: where they are not, guesses are worse and no text changes.
    """

    reads_hidden = "nothing"

    def __init__(self, program: Program, store: KVStore, guesser: Guesser) -> None:
        """`program` runs the drafter over `store`, which is of both."""
        self.name = f"a model by {program.name}"
        self._program, self._store, self._guesser = program, store, guesser
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
            # Of what is complete and not guessed on, as a beam, nothing is needed.
            followed = [t for t, item in zip(texts, items, strict=True) if item.max_draft_tokens or not item.samples]
            current = self._catch_up(followed, terms)
            while current:
                current = self._guess_on(current, terms)
        return [text.draft.worth for text in texts]

    def _follow(self, item: ScheduledRequest, request: RunnerRequest) -> _Text:
        """A request as it is after its step, to be guessed on."""
        text = self._texts.setdefault(request.request_id, _Text(item.num_computed_tokens))
        guess = Guess() if text.draft is None else text.draft.guess
        right = self._guesser.learn(guess, request.token_ids)
        if right < len(guess.token_ids):
            text.num_computed = min(text.num_computed, guess.at + right)  # from there K and V are another word's
        # One is left to compute: the next guess follows from it.
        text.num_computed = min(text.num_computed, len(request.token_ids) - 1)
        text.num_slots = min(
            len(blocks) * group.block_tokens
            for blocks, group in zip(request.block_ids, self._store.layout.groups, strict=True)
        )
        end = len(request.token_ids) if item.samples else item.num_computed_tokens + item.num_scheduled_tokens
        # The last guess is not computed: it needs no slot.
        count = max(0, min(item.max_draft_tokens, text.num_slots - end + 1))
        text.draft = self._guesser.begin(request, count, request.token_ids[:end])
        return text

    def _catch_up(self, texts: Sequence[_Text], terms: DraftTerms) -> list[_Text]:
        """Compute what is new of each text, as much as one step allows, and return those that can be guessed on."""
        left, spans, ready = CATCH_UP_TOKENS, [], []
        for text in texts:
            known = len(text.draft.view.token_ids)
            num_new = min(left, min(text.num_slots, known) - text.num_computed)
            if num_new <= 0:
                continue
            spans.append((text, num_new))
            left -= num_new
            if text.draft.count > 0 and text.num_computed + num_new == known:
                ready.append(text)
        self._extend(spans, ready, terms)
        return ready

    def _extend(self, spans: Sequence[tuple[_Text, int]], guessed: Sequence[_Text], terms: DraftTerms) -> None:
        """Compute the next tokens of texts, and add a guess to those in `guessed`, whose last token is among them."""
        if not spans:
            return
        wanted = {id(text) for text in guessed}
        steps = [
            ScheduledRequest(
                request_id=text.draft.view.request_id,
                num_computed_tokens=text.num_computed,
                num_scheduled_tokens=num_new,
                samples=id(text) in wanted,
            )
            for text, num_new in spans
        ]
        views = [text.draft.view for text, _ in spans]
        inputs = BatchInputs.build(steps, views, self._store.layout, self._store.device)
        hidden = self._program.forward(inputs)
        for text, num_new in spans:
            text.num_computed += num_new
        if not guessed:
            return
        rows = [end - 1 for end, step in zip(inputs.query_start_loc[1:], steps, strict=True) if step.samples]
        logits = self._program.logits(hidden[torch.tensor(rows, device=hidden.device)])
        self._guesser.add(logits, [text.draft for text in guessed], terms)

    def _guess_on(self, texts: Sequence[_Text], terms: DraftTerms) -> list[_Text]:
        """Another guess for those that it is worth for; they are returned."""
        more = self._guesser.worth_more([text.draft for text in texts], self._price, terms)
        kept = {id(draft) for draft in more}
        more = [text for text in texts if id(text.draft) in kept]
        if more:
            with self._price.timed():
                self._extend([(text, 1) for text in more], more, terms)
        return more
