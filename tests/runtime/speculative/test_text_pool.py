"""N-grams of other requests' answers: found, bounded, never across salts, and without a trace in the text."""

import itertools
import random

import pytest
from drafters import everything, prompts
from engine_driver import Collected, greedy, run_all

from llmq.runtime.config import Speculation
from llmq.runtime.request import EngineRequest
from llmq.runtime.speculative.text_pool import TextPool


def naive_longest(texts: list[list[int]], token_ids: list[int]) -> int:
    """Of all places in all texts the most tokens, up to 5, that agree with the end, where something follows."""
    longest = 0
    for text in texts:
        for end in range(2, len(text)):
            for length in range(2, min(5, end, len(token_ids)) + 1):
                if text[end - length : end] == token_ids[-length:]:
                    longest = max(longest, length)
    return longest


def test_matches_are_those_of_a_search_through_all_texts():
    draw = random.Random(0)
    # Few repeats of a run, so that all its places are kept.
    texts = [[draw.randrange(30) for _ in range(40)] for _ in range(6)]
    pool = TextPool(10_000, shortest=2, longest=5)
    for text in texts:
        pool.add("", text)
    lengths = []
    for _ in range(300):
        end = draw.choice(texts)[: draw.randint(3, 40)] if draw.random() < 0.5 else [draw.randrange(30), 3, 4]
        found = pool.longest_match("", end)
        lengths.append(0 if found is None else found.length)
        assert lengths[-1] == naive_longest(texts, end)
        if found is not None:
            assert list(found.text.token_ids[found.place - found.length : found.place]) == end[-found.length :]
    assert 0 in lengths
    assert max(lengths) == 5


def test_it_holds_so_many_tokens_and_drops_the_least_used():
    pool = TextPool(30, shortest=2, longest=5)
    for first in (100, 200, 300):
        pool.add("", range(first, first + 10))
    assert pool.longest_match("", [100, 101]).length == 2
    pool.add("", range(400, 410))
    assert pool.num_tokens == 30
    assert pool.longest_match("", [200, 201]) is None
    assert all(pool.longest_match("", [first, first + 1]) is not None for first in (100, 300, 400))
    pool.add("", range(1000, 1100))
    assert pool.num_tokens == 30
    assert pool.longest_match("", [1080, 1081]).text.token_ids == tuple(range(1070, 1100))
    assert pool.longest_match("", [100, 101]) is None
    draw = random.Random(0)
    for _ in range(40):
        pool.add("", [draw.randrange(5) for _ in range(12)])
    assert pool.num_tokens <= 30
    living = list(pool._texts.values())
    assert all(text in living for places in pool._places.values() for text, _ in places)


def test_nothing_is_found_across_salts():
    pool = TextPool(100, shortest=2, longest=5)
    pool.add("a", range(10))
    assert pool.longest_match("b", [1, 2]) is None
    assert pool.longest_match("", [1, 2]) is None
    assert pool.longest_match("a", [1, 2]).place == 3


def run_salted(engine, given: list[list[int]], salt: str) -> list[Collected]:
    made = {str(index): Collected() for index in range(len(given))}
    for name, prompt in zip(made, given, strict=True):
        engine.add_request(
            EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=greedy(40), cache_salt=salt)
        )
    while engine.has_unfinished_requests:
        for output in engine.step():
            made[output.request_id].add(output)
    return list(made.values())


@pytest.mark.parametrize("adaptive", [False, True])
def test_who_asks_again_is_guessed_by_the_answer_before(tiny_llama, make_engine, adaptive):
    folder, given = tiny_llama(), prompts(6)
    plain = run_all(make_engine(folder), given, greedy(40))
    speculation = Speculation(method="ngram", num_tokens=4, pool_tokens=10_000, adaptive=adaptive)
    engine = make_engine(folder, speculation=speculation)
    seen = [engine.stats()]
    for salt in ("one", "another", "one"):
        assert everything(run_salted(engine, given, salt)) == everything(plain)
        seen.append(engine.stats())
    if adaptive:  # then what is worth a guess is the machine's to say
        return
    pooled, accepted = (
        [getattr(after, name) - getattr(before, name) for before, after in itertools.pairwise(seen)]
        for name in ("pooled_draft_tokens", "accepted_draft_tokens")
    )
    assert pooled[2] > pooled[1] + 50
    assert accepted[2] > accepted[1] + 50
