"""NgramDrafter: a text goes on as it did the last time that it said the same (prompt lookup decoding)."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest
from llmq.runtime.speculative.drafter import Acceptance
from llmq.runtime.speculative.text_pool import TextPool
from llmq.runtime.speculative.worth import num_worth

SHORTEST = 2  # tokens that have to be the same
LONGEST = 8  # a match is not measured beyond: more does not speak for more
CANDIDATES = 8  # places that are compared, the last ones first
# The chance of the next token after a match of 2, 3, … LONGEST tokens, until it is known of this server's texts.
PRIORS = (0.3, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8)
# A text repeats itself more or less than others do: what is known of it counts against so many guesses that were right
# as often as elsewhere.
USUAL_GUESSES = 4.0
# After so many steps in which no guess was worth verifying, texts are looked at in one of RESTING_STEPS only: a look is
# a hundredth of a small model's step.
IDLE_STEPS, RESTING_STEPS = 32, 4


@dataclass
class _Text:
    """Where each run of SHORTEST tokens of a request has been, and what was last guessed."""

    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # run -> where it ended
    num_indexed: int = 0  # runs that end before this position are in `places`
    guessed_at: int = 0
    guess: list[int] = field(default_factory=list)
    matched: int = 0
    is_pooled: bool = False  # it was guessed by another request's text
    request: RunnerRequest | None = None
    num_right: float = 0.0  # of its guesses,
    num_expected: float = 0.0  # and of as many of other texts

    @property
    def repeats(self) -> float:
        """How often its guesses are right over those of other texts: the mean of a Gamma distribution of the rate, that
        begins at 1."""
        return (USUAL_GUESSES + self.num_right) / (USUAL_GUESSES + self.num_expected)


class NgramDrafter:
    """Of the places where the last tokens stood before, in prompt and output, the one where most of them agree, and of
    equal ones the latest, says how it goes on.

    Hash index of pairs, extended token by token: a proposal costs the new tokens and CANDIDATES comparisons, whatever
    the length of the text. Every guess is compared with what came, also those that were not worth verifying: so it is
    known, at next to no cost, how often a match of each length is right, of all texts and of this one over them, and
    what turned itself off turns itself on again.

    With a pool what finished requests have answered speaks too, where more of it agrees.
    """

    name = "n-gram"
    reads_hidden = "nothing"
    computes = False

    def __init__(self, pool: TextPool | None = None) -> None:
        self._texts: dict[str, _Text] = {}
        self._acceptance, self._pooled = Acceptance(PRIORS), Acceptance(PRIORS)
        self._pool, self.num_pooled = pool, 0
        self._num_idle = 0  # steps since a guess was worth it

    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        self._num_idle += 1
        if self._rests(requests, terms):
            return [[] for _ in items]
        texts = [
            self._guess(request, item.max_draft_tokens) if item.max_draft_tokens else _Text()
            for item, request in zip(items, requests, strict=True)
        ]
        counts = num_worth([self._chances(text) for text in texts], terms)
        if any(counts):
            self._num_idle = 0
        self.num_pooled += sum(count for text, count in zip(texts, counts, strict=True) if text.is_pooled)
        return [text.guess[:count] for text, count in zip(texts, counts, strict=True)]

    def _rests(self, requests: Sequence[RunnerRequest], terms: DraftTerms) -> bool:
        if terms.prices is None or self._num_idle <= IDLE_STEPS or self._num_idle % RESTING_STEPS == 0:
            return False
        return all(request.request_id in self._texts for request in requests)  # another text may be another kind of it

    def end_trial(self) -> None:
        pass

    def forget(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None and self._pool is not None:
            # What was answered, and what it was answered to as far as a match is measured.
            first = max(0, text.request.num_prompt_tokens - LONGEST)
            self._pool.add(text.request.cache_salt, text.request.token_ids[first:])

    def _guess(self, request: RunnerRequest, count: int) -> _Text:
        """What it said next the last time, at most `count` tokens, which are compared with what comes."""
        text, token_ids = self._texts.setdefault(request.request_id, _Text(request=request)), request.token_ids
        self._learn(text, token_ids)
        _index(text, token_ids)
        place, matched = _longest_match(text, token_ids)
        text.guess = [] if place is None else _following(token_ids, place, count)
        found = None if self._pool is None else self._pool.longest_match(request.cache_salt, token_ids)
        text.is_pooled = found is not None and found.length > matched
        if text.is_pooled:
            matched, text.guess = found.length, list(found.text.token_ids[found.place : found.place + count])
        text.guessed_at, text.matched = len(token_ids), matched
        return text

    def _chances(self, text: _Text) -> list[float]:
        """That each guess is right, and all before it."""
        first, lower, repeats = text.matched - SHORTEST, self._acceptance_of(text).lower, text.repeats
        chances = [min(1.0, repeats * lower(level)) for level in range(first, first + len(text.guess))]
        return list(itertools.accumulate(chances, operator.mul))

    def _acceptance_of(self, text: _Text) -> Acceptance:
        return self._pooled if text.is_pooled else self._acceptance

    def _learn(self, text: _Text, token_ids: Sequence[int]) -> None:
        acceptance = self._acceptance_of(text)
        for level, (guess, came) in enumerate(
            zip(text.guess, token_ids[text.guessed_at :], strict=False), text.matched - SHORTEST
        ):
            text.num_expected += acceptance.share(level)
            text.num_right += guess == came
            acceptance.count(level, guess == came)
            if guess != came:
                break


def _index(text: _Text, token_ids: Sequence[int]) -> None:
    """All runs but the one that the text ends with: what follows it is the question."""
    for end in range(max(text.num_indexed, SHORTEST), len(token_ids)):
        places = text.places.setdefault(tuple(token_ids[end - SHORTEST : end]), [])
        places.append(end)
        if len(places) > 2 * CANDIDATES:
            del places[:CANDIDATES]
    text.num_indexed = len(token_ids)


def _longest_match(text: _Text, token_ids: Sequence[int]) -> tuple[int | None, int]:
    """(where the text that most resembles the end of `token_ids` goes on, how many tokens agree)."""
    best, longest = None, 0
    for place in reversed(text.places.get(tuple(token_ids[-SHORTEST:]), ())[-CANDIDATES:]):
        matched = SHORTEST
        while matched < LONGEST and matched < place and token_ids[place - matched - 1] == token_ids[-matched - 1]:
            matched += 1
        if matched > longest:
            best, longest = place, matched
    return best, longest


def _following(token_ids: Sequence[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; beyond the end of the text the guess goes on, as in a text that repeats."""
    found = list(token_ids[place : place + count])
    period = len(token_ids) - place
    while len(found) < count:
        found.append(found[-period])
    return found
