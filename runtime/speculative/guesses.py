"""Guesses drawn from logits: by a request's own parameters and noise, with the chance that they are right."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.sampling.sampler import Sampler, over_temperatures
from llmq.runtime.scheduler_output import DraftTerms
from llmq.runtime.speculative.drafter import Acceptance
from llmq.runtime.speculative.pass_price import PassPrice
from llmq.runtime.speculative.worth import num_worth

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
    chances: list[float] = field(default_factory=list)  # that each guess is right, and all before it

    @property
    def chance(self) -> float:
        """That all guesses are right."""
        return self.chances[-1] if self.chances else 1.0

    @property
    def wants_more(self) -> bool:
        return len(self.guess.token_ids) < self.count


class Guesser:
    """Draws by the noise that the model will draw by, keyed by (seed, position): a guess at temperature 1 is right as
    often as two draws can be that know nothing of each other (`verification`). A grammar does not bind it.

    How often a guess of some probability was right is learned, from all requests.
    """

    def __init__(self, sampler: Sampler, vocab_size: int) -> None:
        """`sampler` follows no grammar; `vocab_size` is the model's."""
        self._sampler, self._vocab_size = sampler, vocab_size
        self.unlearn()

    def unlearn(self) -> None:
        """Nothing is known of how often guesses are right."""
        self._acceptance = Acceptance([(level + 0.5) / LEVELS for level in range(LEVELS)])
        self._first = Acceptance([0.6])

    @property
    def first_chance(self) -> float:
        """Of first guesses, whatever their probability: at least so much."""
        return self._first.lower(0)

    @property
    def hoped_chance(self) -> float:
        """The same, at most."""
        return self._first.upper(0)

    def wait(self) -> None:
        """Nothing was guessed in a step."""
        self._first.fade()

    def begin(self, request: RunnerRequest, count: int, token_ids: Sequence[int] | None = None) -> Draft:
        """`token_ids`: what is known of the request, where that is not all of it."""
        view = copy.copy(request)
        view.params = msgspec.structs.replace(request.params, grammar=None, logprobs=None)
        view.score_prompt = False
        view.token_ids = list(request.token_ids if token_ids is None else token_ids)
        return Draft(view, count, Guess(at=len(view.token_ids)))

    def worth_more(self, drafts: Sequence[Draft], price: PassPrice, terms: DraftTerms, spent_s: float) -> list[Draft]:
        """Those of which another guess is worth a pass, or that one and some behind it, where guessing has taken
        `spent_s`: the likeliest, as many as gain most. A guess has to be right after all before it: with it, they are
        right less often."""
        more = sorted((draft for draft in drafts if draft.wants_more), key=lambda draft: -draft.chance)
        if (prices := terms.prices) is None:
            return more
        made = sum(len(draft.chances) for draft in drafts)
        rows_s, most = np.array(prices.rows_s), min(len(more), len(prices.rows_s) - 1 - made)
        chances, best = 0.0, (0.0, 0)
        for count, draft in enumerate(more[: max(0, most)], 1):
            chances += draft.chance
            pass_s, deepest = price.seconds(count), draft.count - len(draft.chances)
            if spent_s + pass_s + rows_s[made + count] > prices.spare_s:
                break
            # As deep as it gains most: the rows of one guess more may cost much, and those of the next ones nothing.
            more_s = rows_s[made + count :: count][:deepest] - rows_s[made]
            right = np.cumprod(np.full(len(more_s), self.first_chance)).cumsum()
            gained_s = prices.token_s * chances * right - pass_s * np.arange(1, len(more_s) + 1) - more_s
            best = max(best, (float(gained_s.max()), count))
        return more[: best[1]]

    def keep_worth(self, drafts: Sequence[Draft], terms: DraftTerms, spent_s: float) -> list[list[int]]:
        """The guesses of each draft that are verified, where guessing has taken `spent_s`."""
        counts = num_worth([draft.chances for draft in drafts], terms, spent_s)
        return [draft.guess.token_ids[:count] for draft, count in zip(drafts, counts, strict=True)]

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

    def add(self, logits: Tensor, drafts: Sequence[Draft]) -> None:
        """A token more for each draft, from float32 logits [num_drafts, words of the drafter]."""
        logits = _in_vocabulary(logits, self._vocab_size)
        made = self._sampler(logits, [draft.view for draft in drafts])  # changes `logits` by penalties and biases
        temperatures = torch.tensor([draft.view.params.temperature or 1.0 for draft in drafts], device=logits.device)
        chosen = torch.tensor([one.token_ids[0] if one.error is None else 0 for one in made], device=logits.device)
        scaled = over_temperatures(logits, temperatures)
        chances = torch.exp(scaled.gather(1, chosen[:, None])[:, 0] - torch.logsumexp(scaled, dim=-1)).tolist()
        for draft, one, chance in zip(drafts, made, chances, strict=True):
            if one.error is not None:
                draft.count = 0
                continue
            level = min(LEVELS - 1, int(chance * LEVELS))
            draft.chances.append(draft.chance * self._acceptance.lower(level))
            draft.guess.token_ids.append(one.token_ids[0])
            draft.guess.levels.append(level)
            draft.view.token_ids.append(one.token_ids[0])


def _in_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Without the words that only pad the drafter's vocabulary, or with none for those that only pad the model's."""
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[1]), value=-torch.inf)
