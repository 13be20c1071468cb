"""NgramDrafter against a search through the whole text, and what it learns of its own guesses."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import DraftPrices, DraftTerms, NewRequest, ScheduledRequest
from llmq.runtime.speculative.drafter import Acceptance
from llmq.runtime.speculative.ngram import (
    CANDIDATES,
    IDLE_STEPS,
    LONGEST,
    PRIORS,
    RESTING_STEPS,
    SHORTEST,
    NgramDrafter,
)
from llmq.runtime.speculative.worth import MARGIN


def request(token_ids: list[int], name: str = "a") -> RunnerRequest:
    new = NewRequest(
        request_id=name,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(),
        score_prompt=False,
    )
    return RunnerRequest(new, 1)


def guess(drafter: NgramDrafter, known: RunnerRequest, count: int, least: float | None = None) -> list[list[int]]:
    """least: the chance that repays a row."""
    prices = None
    if least is not None:
        rows_s = tuple((1.0 - MARGIN) * least * n for n in range(count + 1))
        prices = DraftPrices(token_s=1.0, rows_s=rows_s, plain_s=1.0, spare_s=100.0)
    item = ScheduledRequest(
        request_id=known.request_id, num_computed_tokens=0, num_scheduled_tokens=1, samples=True, max_draft_tokens=count
    )
    return drafter.propose([item], [known], DraftTerms(num_tokens=count, prices=prices))


def searched(token_ids: list[int], count: int) -> list[int]:
    """The definition: of the last CANDIDATES places before the end where the last SHORTEST tokens stood, the one with
    the longest common past (up to LONGEST), the latest of equals; then what stood there, over and over at the end."""
    ends = [end for end in range(SHORTEST, len(token_ids)) if token_ids[end - SHORTEST : end] == token_ids[-SHORTEST:]]
    best, longest = None, 0
    for end in reversed(ends[-CANDIDATES:]):
        matched = max(
            n for n in range(LONGEST + 1) if n <= end and token_ids[end - n : end] == token_ids[len(token_ids) - n :]
        )
        if matched > longest:
            best, longest = end, matched
    if best is None:
        return []
    text = list(token_ids)
    for index in range(count):
        text.append(text[best + index])
    return text[len(token_ids) :]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 20))
def test_guesses_are_those_of_a_search_through_the_whole_text(token_ids, count, first):
    drafter, known = NgramDrafter(), request(token_ids[:first])
    guess(drafter, known, count)  # what is indexed piece by piece
    while len(known.token_ids) < len(token_ids):
        known.token_ids.append(token_ids[len(known.token_ids)])
        assert guess(drafter, known, count) == [searched(known.token_ids, count)]


def test_a_guess_that_is_not_worth_it_is_not_made_but_learned_from():
    period = [1, 2, 3, 4, 5, 6, 7]
    drafter, known = NgramDrafter(), request(2 * period)
    assert guess(drafter, known, 4, 0.97) == [[]]
    for step in range(200):
        known.token_ids.append(period[step % 7])
        proposed = guess(drafter, known, 4, 0.9)
    assert proposed == [[*period, *period][200 % 7 :][:4]]  # it was right each time, without one being verified


def test_where_nothing_is_worth_it_texts_are_looked_at_now_and_then():
    period = [1, 2, 3, 4, 5, 6, 7]
    drafter, known, looks = NgramDrafter(), request(2 * period), []
    for step in range(IDLE_STEPS + 8 * RESTING_STEPS):
        guess(drafter, known, 4, 1.1)
        looks.append(drafter._texts["a"].guessed_at == len(known.token_ids))
        known.token_ids.append(period[step % 7])
    assert all(looks[:IDLE_STEPS])
    assert sum(looks[IDLE_STEPS:]) == 8
    asked = [bool(guess(drafter, known, 4, 0.1)[0]) for _ in range(RESTING_STEPS)]
    assert any(asked)
    assert asked == sorted(asked)  # with a guess that is worth it the rest has ended
    for _ in range(IDLE_STEPS + 1):
        guess(drafter, known, 4, 1.1)
    other = request(2 * period, "b")
    assert guess(drafter, other, 4, 0.1) != [[]]  # a new request is looked at
    for _ in range(IDLE_STEPS + RESTING_STEPS):
        assert guess(drafter, known, 4) != [[]]  # without prices there is no rest


def test_a_text_that_repeats_itself_is_told_from_one_that_does_not():
    period, rng = [1, 2, 3, 4, 5, 6, 7], random.Random(0)
    drafter, same, other = NgramDrafter(), request(2 * period), request(2 * period, "b")
    for step in range(60):
        for known in (same, other):
            proposed = guess(drafter, known, 1, 0.75)
            if known is same or rng.random() < 0.4:
                known.token_ids.append(period[step % 7])
            else:  # the text goes on as it did, but for a word
                known.token_ids += [8, *[period[(step + behind) % 7] for behind in range(-6, 1)]]
            if step > 30:
                assert bool(proposed[0]) == (known is same)
    assert drafter._texts["a"].repeats > 1.0 > drafter._texts["b"].repeats


def test_chances_multiply_along_a_draft():
    drafter, known = NgramDrafter(), request([1, 2, 3, 4, 5, 6, 1, 2])
    lower = [Acceptance([prior]).lower(0) for prior in PRIORS[:2]]
    assert lower == [pytest.approx(0.3 - (0.3 * 0.7 / 5) ** 0.5), pytest.approx(0.45 - (0.45 * 0.55 / 5) ** 0.5)]
    second = lower[0] * lower[1]
    prices = (None, 0.0, 0.99 * second, 1.01 * second, 0.99 * lower[0], 1.01 * lower[0])
    assert [len(guess(NgramDrafter(), known, 4, least)[0]) for least in prices] == [4, 4, 2, 1, 1, 0]
    assert guess(drafter, known, 4, 0.99 * second) == [[3, 4]]


def test_what_is_forgotten_leaves_nothing():
    drafter = NgramDrafter()
    guess(drafter, request([1, 2, 1, 2]), 4)
    drafter.forget("a")
    drafter.forget("never seen")
    assert not drafter._texts


def test_acceptance_follows_what_happens():
    acceptance = Acceptance((0.5, 0.9))
    assert (acceptance.share(0), acceptance.share(1), acceptance.share(9)) == (0.5, 0.9, 0.9)
    for _ in range(1000):
        acceptance.count(0, True)
    assert acceptance.share(0) > 0.98
    for _ in range(300):
        acceptance.count(0, False)
    assert acceptance.share(0) < 0.3
    assert acceptance.share(1) == 0.9
    assert acceptance.lower(1) == pytest.approx(0.9 - 0.018**0.5)
    spans = []
    for _ in range(3):
        spans.append(acceptance.upper(0) - acceptance.lower(0))
        share = acceptance.share(0)
        for _ in range(500):
            acceptance.fade()
        assert acceptance.share(0) == pytest.approx(share)
    assert spans[0] < spans[1] < spans[2]  # what was long ago says less
