"""Speculation changes how many steps a text takes, and nothing of the text: against the same engine without it."""

import pytest
from drafters import KnowingDrafter, everything, prompts, use
from engine_driver import Collected, force_preemption, greedy, run_all

from llmq.runtime.config import Speculation
from llmq.runtime.frontend.grammar import json_grammar
from llmq.runtime.request import BeamParams, EngineRequest
from llmq.runtime.sampling_params import SamplingParams

VOCAB = 512
DRAFTS = (1, 2, 4, 8)
SHARES = {"perfect": 1.0, "random": 0.0}


def guessing(make_engine, folder, k: int, given, plain: list[Collected], share: float | None, **changes):
    """An engine that guesses what the plain run said; with None by n-grams."""
    engine = make_engine(folder, speculation=Speculation(method="ngram", num_tokens=k), **changes)
    if share is None:
        return engine
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(given, plain, strict=True)]
    return use(engine, KnowingDrafter(texts, VOCAB, share))


@pytest.fixture(scope="module")
def plain_greedy():
    """What 200 prompts say without speculation, once for all tests."""
    return {}


@pytest.mark.parametrize("k", DRAFTS)
@pytest.mark.parametrize("share", [*SHARES.values(), None], ids=[*SHARES, "n-gram"])
def test_greedy_tokens_are_those_without_alone_and_16_at_once(tiny_llama, make_engine, plain_greedy, k, share):
    folder, given = tiny_llama(), prompts(200)
    ends = frozenset(range(3, 40))
    params = [SamplingParams(temperature=0.0, max_tokens=1 + index % 17, stop_token_ids=ends) for index in range(200)]
    if not plain_greedy:
        plain_greedy["made"] = run_all(make_engine(folder), given, params)
    plain = plain_greedy["made"]
    assert {one.finish_reason for one in plain} == {"stop", "length"}
    for changes in ({"max_num_seqs": 16}, {"max_num_seqs": 1}):
        engine = guessing(make_engine, folder, k, given, plain, share, **changes)
        assert everything(run_all(engine, given, params)) == everything(plain)
        stats = engine.stats()
        if share == 1.0:
            assert stats.accepted_draft_tokens == stats.draft_tokens > 0
        elif share == 0.0:
            assert stats.accepted_draft_tokens < 0.02 * stats.draft_tokens


def test_a_perfect_drafter_saves_the_steps_that_it_can(tiny_llama, make_engine):
    folder, given = tiny_llama(), prompts(1)
    plain = run_all(make_engine(folder), given, greedy(41))
    engine = guessing(make_engine, folder, 4, given, plain, 1.0)
    assert everything(run_all(engine, given, greedy(41))) == everything(plain)
    assert engine.stats().num_steps == 1 + 8  # one token, then eight times four drafts and one more


@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_text_ends_at_the_models_context_and_no_position_is_beyond_it(tiny_llama, make_engine, k):
    folder, given = tiny_llama(), prompts(8)
    plain = run_all(make_engine(folder, max_model_len=48), given, greedy(100))
    assert {one.finish_reason for one in plain} == {"length"}
    drafter = Speculation(method="draft", num_tokens=k, draft_model=str(folder))
    for speculation in (None, drafter):
        engine = make_engine(
            folder, max_model_len=48, speculation=speculation or Speculation(method="ngram", num_tokens=k)
        )
        if speculation is None:
            use(engine, KnowingDrafter([[*p, *one.token_ids] for p, one in zip(given, plain, strict=True)], VOCAB, 1.0))
        assert everything(run_all(engine, given, greedy(100))) == everything(plain)


SETTINGS = {
    "sampled": {"temperature": 1.0, "seed": 7},
    "top-p, min-p": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": 8},
    "top-k": {"temperature": 1.3, "top_k": 40, "seed": 9},
    "penalties": {
        "temperature": 0.9,
        "seed": 10,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "bias, logprobs": {"temperature": 1.0, "seed": 11, "logit_bias": {5: 8.0, 6: 8.0, 7: -100.0}, "logprobs": 3},
    "stop tokens": {"temperature": 1.0, "seed": 12, "stop_token_ids": frozenset(range(3, 60)), "min_tokens": 5},
    "no seed": {"temperature": 1.0},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_sampled_tokens_are_those_without(tiny_llama, make_engine, name, share):
    folder, given = tiny_llama(), prompts(12)
    params = SamplingParams(**{"max_tokens": 24, **SETTINGS[name]})
    plain = run_all(make_engine(folder), given, params)
    engine = guessing(make_engine, folder, 4, given, plain, share)
    made = run_all(engine, given, params)
    assert everything(made) == everything(plain)
    assert engine.stats().accepted_draft_tokens > 0
    for one, other in zip(made, plain, strict=True):
        assert [e.logprob for e in one.logprobs] == pytest.approx([e.logprob for e in other.logprobs], abs=1e-4)
        assert [e.rank for e in one.logprobs] == [e.rank for e in other.logprobs]


@pytest.mark.parametrize("isolate", [False, True])
def test_a_grammar_is_followed_behind_drafts(tiny_llama, make_engine, isolate):
    folder, given = tiny_llama(), prompts(3)
    schema = {"type": "array", "items": {"enum": ["red", "green", 7, None]}, "minItems": 2, "maxItems": 5}
    grammar = json_grammar(schema)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, grammar=grammar, isolate_grammar=isolate)
    plain = run_all(make_engine(folder), given, params)
    for share in (1.0, 0.5):
        engine = guessing(make_engine, folder, 4, given, plain, share)
        assert everything(run_all(engine, given, params)) == everything(plain)
        assert engine.stats().accepted_draft_tokens > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_num_batched_tokens": 32, "max_num_seqs": 16},
        {"enable_prefix_caching": False},
        {"kv_dtype": "int8"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("window", [None, 24])
def test_schedules_windows_and_kv_dtypes(tiny_llama, make_engine, window, changes):
    folder, given = tiny_llama(model_type="mistral", sliding_window=window), prompts(16, 60)
    plain = run_all(make_engine(folder, kv_dtype=changes.get("kv_dtype", "auto")), given, greedy(30))
    engine = guessing(make_engine, folder, 4, given, plain, 0.7, **changes)
    assert everything(run_all(engine, given, greedy(30))) == everything(plain)


def test_a_pool_that_runs_dry_loses_drafts_and_no_token(tiny_llama, make_engine):
    folder, given = tiny_llama(), prompts(8)
    plain = run_all(make_engine(folder), given, greedy(60))
    engine = guessing(make_engine, folder, 8, given, plain, 0.7, kv_cache_memory_bytes=96 * 1024, max_model_len=96)
    force_preemption(engine)
    assert everything(run_all(engine, given, greedy(60))) == everything(plain)
    assert engine.stats().num_preemptions > 0


def test_rejected_drafts_never_enter_the_prefix_cache(tiny_llama, make_engine):
    """Every text is asked again as a prompt: what the cache has of it is what it was computed to be."""
    folder, given = tiny_llama(), prompts(8)
    plain = run_all(make_engine(folder), given, greedy(40))
    engine = guessing(make_engine, folder, 8, given, plain, 0.5)
    run_all(engine, given, greedy(40))
    longer = [[*prompt, *one.token_ids] for prompt, one in zip(given, plain, strict=True)]
    expected = run_all(make_engine(folder, enable_prefix_caching=False), longer, greedy(10))
    again = run_all(engine, longer, greedy(10))
    assert [one.token_ids for one in again] == [one.token_ids for one in expected]
    # Blocks that accepted drafts have filled are in it, the last ones too.
    assert all(one.num_cached_tokens >= len(text) // 16 * 16 - 16 for one, text in zip(again, longer, strict=True))


def test_forks_and_beams_beside_drafted_requests(tiny_llama, make_engine):
    folder, given = tiny_llama(), prompts(4)

    def run(engine) -> dict[str, Collected]:
        made: dict[str, Collected] = {}
        for index, prompt in enumerate(given):
            params = SamplingParams(temperature=1.0, seed=index, max_tokens=20)
            forks = [(f"{index}/{n}", 100 + n) for n in range(2)]
            beams = BeamParams(width=3) if index % 2 else None
            engine.add_request(
                EngineRequest(
                    request_id=str(index), prompt_token_ids=prompt, sampling_params=params, forks=forks, beams=beams
                )
            )
        while engine.has_unfinished_requests:
            for output in engine.step():
                made.setdefault(output.request_id, Collected()).add(output)
        return made

    plain = run(make_engine(folder))
    texts = [[*given[int(name.split("/")[0])], *one.token_ids] for name, one in plain.items()]
    engine = make_engine(folder, speculation=Speculation(method="ngram", num_tokens=4))
    made = run(use(engine, KnowingDrafter(texts, VOCAB, 0.8)))
    assert {name: one.token_ids for name, one in made.items()} == {name: one.token_ids for name, one in plain.items()}
    assert engine.stats().accepted_draft_tokens > 0
