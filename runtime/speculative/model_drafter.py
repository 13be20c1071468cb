"""ModelDrafter: a smaller decoder of the same words says what it would say."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from llmq.runtime.batch import BatchInputs, RunnerRequest
from llmq.runtime.kv_store import KVStore
from llmq.runtime.programs.base import Program
from llmq.runtime.sampling.sampler import Sampler
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest
from llmq.runtime.speculative.drafter import Acceptance

# What it reads at most in a step beside the model's own, of prompts and of texts that it has not followed.
CATCH_UP_TOKENS = 512
# Drafts are told apart by the probability that the drafter gave them: so many classes from 0 to 1.
LEVELS = 10
# Where its first guess has not been worth its time it is asked again after so many steps.
PROBE_STEPS = 64
_FORGET = 1 / 8


@dataclass
class _Text:
    """What the drafter has of one request."""

    num_computed: int  # tokens whose K and V are in its layers
    guessed_at: int = 0
    guess: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)


@dataclass
class _Draft:
    """One request while it is guessed on: a copy of it that grows by what is guessed."""

    view: RunnerRequest
    text: _Text
    count: int  # guesses at most
    slots: int  # for its K and V, from position 0 on
    chance: float = 1.0  # that all guesses are right
    num_worth: int = 0  # the first of them, that are worth verifying


class ModelDrafter:
    """Its layers keep K and V in the blocks of the requests themselves, behind the model's: one block table, one prefix
    cache, one admission. After a step it computes what is new of the texts, then a guess at a time for all of them.

    It draws by the noise that the model will draw by, keyed by (seed, position), so that a guess at temperature 1 is
    right as often as two draws can be that know nothing of each other (`verification`). A grammar does not bind it.
    Its K and V behind a prefix hit are taken to be there: where they are not, guesses are worse and no text changes.
    """

    def __init__(self, program: Program, store: KVStore, sampler: Sampler, vocab_size: int) -> None:
        """`program` runs the drafter over `store`, which is of both; `vocab_size` is the model's."""
        self.name = f"a model by {program.name}"
        self._program, self._store, self._sampler = program, store, sampler
        self._vocab_size = vocab_size
        self._texts: dict[str, _Text] = {}
        self._acceptance = Acceptance([(level + 0.5) / LEVELS for level in range(LEVELS)])
        self._first = Acceptance([0.6])  # of first guesses, whatever their probability
        self._pass_s = 0.0  # of one pass over all that are guessed on, running mean
        self._num_idle = 0

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    @torch.inference_mode()
    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        for item, request in zip(items, requests, strict=True):
            self._learn(self._texts.setdefault(request.request_id, _Text(item.num_computed_tokens)), request)
        drafts = [self._draft(*pair) for pair in zip(items, requests, strict=True)]
        if self._is_worth_it(sum(draft.count > 0 for draft in drafts), terms):
            # Of what is complete and not guessed on, as a beam, nothing is needed.
            followed = [d for d, item in zip(drafts, items, strict=True) if item.max_draft_tokens or not item.samples]
            current = self._catch_up(followed, terms)
            while current:
                current = self._guess_on(current, terms)
        return [draft.text.guess[: draft.num_worth] for draft in drafts]

    def _learn(self, text: _Text, request: RunnerRequest) -> None:
        came = request.token_ids[text.guessed_at :]
        for index, (guess, level, token_id) in enumerate(zip(text.guess, text.levels, came, strict=False)):
            self._acceptance.count(level, guess == token_id)
            if index == 0:
                self._first.count(0, guess == token_id)
            if guess != token_id:
                text.num_computed = min(text.num_computed, text.guessed_at + index)  # from there K and V are another's
                break
        # One is left to compute: the next guess follows from it.
        text.num_computed = min(text.num_computed, len(request.token_ids) - 1)
        text.guess, text.levels, text.guessed_at = [], [], len(request.token_ids)

    def _draft(self, item: ScheduledRequest, request: RunnerRequest) -> _Draft:
        view = copy.copy(request)
        view.params = msgspec.structs.replace(request.params, grammar=None, logprobs=None)
        view.score_prompt = False
        end = item.num_computed_tokens + item.num_scheduled_tokens
        view.token_ids = list(request.token_ids if item.samples else request.token_ids[:end])
        slots = min(
            len(blocks) * group.block_tokens
            for blocks, group in zip(request.block_ids, self._store.layout.groups, strict=True)
        )
        # The last guess is not computed: it needs no slot.
        count = max(0, min(item.max_draft_tokens, slots - len(view.token_ids) + 1))
        return _Draft(view, self._texts[request.request_id], count, slots)

    def _is_worth_it(self, batch: int, terms: DraftTerms) -> bool:
        """Whether a first guess for each of `batch` requests repays a pass. What was not is tried again now and then:
        texts change, and so does the machine."""
        gain = batch * (self._first.share(0) - terms.least_chance) * terms.token_s
        self._num_idle = 0 if not terms.token_s or gain > self._pass_s else self._num_idle + 1
        return self._num_idle % PROBE_STEPS == 0

    def _catch_up(self, drafts: Sequence[_Draft], terms: DraftTerms) -> list[_Draft]:
        """Compute what is new of each text, as much as one step allows, and return those that can be guessed on."""
        left, spans = CATCH_UP_TOKENS, []
        for draft in drafts:
            num_new = min(left, min(draft.slots, len(draft.view.token_ids)) - draft.text.num_computed)
            if num_new > 0:
                spans.append((draft, num_new))
                left -= num_new
        ready = [draft for draft, num_new in spans if draft.count > 0 and self._is_current(draft, num_new)]
        self._extend(spans, ready, terms)
        return ready

    @staticmethod
    def _is_current(draft: _Draft, num_new: int) -> bool:
        return draft.text.num_computed + num_new == len(draft.view.token_ids)

    def _extend(self, spans: Sequence[tuple[_Draft, int]], guessed: Sequence[_Draft], terms: DraftTerms) -> None:
        """Compute the next tokens of texts, and add a guess to those in `guessed`, whose last token is among them."""
        if not spans:
            return
        wanted = {id(draft) for draft in guessed}
        steps = [
            ScheduledRequest(
                request_id=draft.view.request_id,
                num_computed_tokens=draft.text.num_computed,
                num_scheduled_tokens=num_new,
                samples=id(draft) in wanted,
            )
            for draft, num_new in spans
        ]
        views = [draft.view for draft, _ in spans]
        inputs = BatchInputs.build(steps, views, self._store.layout, self._store.device)
        hidden = self._program.forward(inputs)
        for draft, num_new in spans:
            draft.text.num_computed += num_new
        if not guessed:
            return
        rows = [end - 1 for end, step in zip(inputs.query_start_loc[1:], steps, strict=True) if step.samples]
        logits = self._program.logits(hidden[torch.tensor(rows, device=hidden.device)])
        self._add_guesses(_in_vocabulary(logits, self._vocab_size), guessed, terms)

    def _add_guesses(self, logits: Tensor, drafts: Sequence[_Draft], terms: DraftTerms) -> None:
        made = self._sampler(logits, [draft.view for draft in drafts])  # changes `logits` by penalties and biases
        temperatures = torch.tensor([draft.view.params.temperature or 1.0 for draft in drafts], device=logits.device)
        chosen = torch.tensor([one.token_ids[0] if one.error is None else 0 for one in made], device=logits.device)
        scaled = logits / temperatures[:, None]
        chances = torch.exp(scaled.gather(1, chosen[:, None])[:, 0] - torch.logsumexp(scaled, dim=-1)).tolist()
        for draft, one, chance in zip(drafts, made, chances, strict=True):
            if one.error is not None:
                draft.count = 0
                continue
            level = min(LEVELS - 1, int(chance * LEVELS))
            draft.chance *= self._acceptance.share(level)
            draft.text.guess.append(one.token_ids[0])
            draft.text.levels.append(level)
            draft.view.token_ids.append(one.token_ids[0])
            if draft.chance >= terms.least_chance:
                draft.num_worth = len(draft.text.guess)

    def _guess_on(self, drafts: Sequence[_Draft], terms: DraftTerms) -> list[_Draft]:
        """Another guess for those that it is worth for; they are returned."""
        more = [draft for draft in drafts if len(draft.text.guess) < draft.count]
        price = terms.least_chance
        if terms.token_s and more:
            price += self._pass_s / (len(more) * terms.token_s)
        # What is left is worth less than its own chance: the next guess may be wrong too.
        more = [draft for draft in more if draft.chance * self._first.share(0) >= price]
        if not more:
            return []
        began_s = time.perf_counter()
        self._extend([(draft, 1) for draft in more], more, terms)
        took_s = time.perf_counter() - began_s
        self._pass_s = took_s if not self._pass_s else self._pass_s + _FORGET * (took_s - self._pass_s)
        return more


def _in_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Without the words that only pad the drafter's vocabulary, or with none for those that only pad the model's."""
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[1]), value=-torch.inf)
