"""Guesses drawn from logits: by a request's own parameters and noise, with the chance that they are right."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.sampling.sampler import Sampler
from llmq.runtime.scheduler_output import DraftTerms
from llmq.runtime.speculative.drafter import Acceptance
from llmq.runtime.speculative.pass_price import PassPrice

# Guesses are told apart by the probability that they were drawn with: so many classes from 0 to 1.
LEVELS = 10


@dataclass
class Guess:
    """What was guessed of one request the last time."""

    at: int = 0  # the position of its first token
    token_ids: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)


@dataclass
class Draft:
    """A request while it is guessed on: a copy of it that grows by what is guessed."""

    view: RunnerRequest
    count: int  # guesses at most
    guess: Guess
    chance: float = 1.0  # that all guesses are right
    num_worth: int = 0  # the first of them, that are worth verifying

    @property
    def wants_more(self) -> bool:
        return len(self.guess.token_ids) < self.count

    @property
    def worth(self) -> list[int]:
        return self.guess.token_ids[: self.num_worth]


class Guesser:
    """Draws by the noise that the model will draw by, keyed by (seed, position): a guess at temperature 1 is right as
    often as two draws can be that know nothing of each other (`verification`). A grammar does not bind it.

    How often a guess of some probability was right is learned, from all requests.
    """

    def __init__(self, sampler: Sampler, vocab_size: int) -> None:
        """`sampler` follows no grammar; `vocab_size` is the model's."""
        self._sampler, self._vocab_size = sampler, vocab_size
        self._acceptance = Acceptance([(level + 0.5) / LEVELS for level in range(LEVELS)])
        self._first = Acceptance([0.6])

    @property
    def first_chance(self) -> float:
        """Of first guesses, whatever their probability."""
        return self._first.share(0)

    def begin(self, request: RunnerRequest, count: int, token_ids: Sequence[int] | None = None) -> Draft:
        """`token_ids`: what is known of the request, where that is not all of it."""
        view = copy.copy(request)
        view.params = msgspec.structs.replace(request.params, grammar=None, logprobs=None)
        view.score_prompt = False
        view.token_ids = list(request.token_ids if token_ids is None else token_ids)
        return Draft(view, count, Guess(at=len(view.token_ids)))

    def worth_more(self, drafts: Sequence[Draft], price: PassPrice, terms: DraftTerms) -> list[Draft]:
        """Those of which another guess is worth a pass. It has to be right too: with it, they are right less often."""
        more = [draft for draft in drafts if draft.wants_more]
        least = price.least_chance(max(1, len(more)), terms)
        return [draft for draft in more if draft.chance * self.first_chance >= least]

    def learn(self, guess: Guess, token_ids: Sequence[int]) -> int:
        """Compare a guess with what came, and return how many of its tokens were right before one was not."""
        right = 0
        for token_id, level, came in zip(guess.token_ids, guess.levels, token_ids[guess.at :], strict=False):
            self._acceptance.count(level, token_id == came)
            if right == 0:
                self._first.count(0, token_id == came)
            if token_id != came:
                break
            right += 1
        return right

    def add(self, logits: Tensor, drafts: Sequence[Draft], terms: DraftTerms) -> None:
        """A token more for each draft, from float32 logits [num_drafts, words of the drafter]."""
        logits = _in_vocabulary(logits, self._vocab_size)
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
            draft.guess.token_ids.append(one.token_ids[0])
            draft.guess.levels.append(level)
            draft.view.token_ids.append(one.token_ids[0])
            if draft.chance >= terms.least_chance:
                draft.num_worth = len(draft.guess.token_ids)


def _in_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Without the words that only pad the drafter's vocabulary, or with none for those that only pad the model's."""
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[1]), value=-torch.inf)
