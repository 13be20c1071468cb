"""A decoder that guesses for another: in the same blocks, by the same noise, and without a trace in the text."""

import json
import shutil

import pytest
from drafters import SAMPLED, everything, first_layers, guided, prompts
from engine_driver import force_preemption, greedy, run_all

from llmq.profiles.errors import InputError
from llmq.runtime.config import Speculation
from llmq.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize("params", [greedy(24), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("changes", [{}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}])
def test_a_model_that_guesses_for_itself_is_always_right(tiny_llama, make_engine, params, changes):
    folder, given = tiny_llama(), prompts(12)
    plain = run_all(make_engine(folder), given, params)
    engine = guided(make_engine, folder, folder, **changes)
    assert everything(run_all(engine, given, params)) == everything(plain)
    stats = engine.stats()
    assert stats.accepted_draft_tokens == stats.draft_tokens > 0
    assert stats.draft_s > 0


def test_it_saves_the_steps_that_it_can(tiny_llama, make_engine):
    folder, given = tiny_llama(), prompts(1)
    engine = guided(make_engine, folder, folder)
    run_all(engine, given, greedy(41))
    assert engine.stats().num_steps == 1 + 8


OTHERS = {
    "another model of the same shape": {"initializer_range": 0.05},
    "one layer": {"num_hidden_layers": 1},
    "other heads, so a block table of its own": {"num_key_value_heads": 1, "head_dim": 32},
    "a padded vocabulary": {"vocab_size": 576},
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("window", [None, 24])
def test_any_other_model_changes_no_token(tiny_llama, make_engine, name, window):
    folder = tiny_llama() if window is None else tiny_llama(model_type="mistral", sliding_window=window)
    given = prompts(12, 60)
    for params in (greedy(30), SAMPLED):
        plain = run_all(make_engine(folder), given, params)
        engine = guided(make_engine, folder, tiny_llama(**OTHERS[name]))
        assert everything(run_all(engine, given, params)) == everything(plain)
        assert engine.stats().draft_tokens > 0
        # All of it again, from the prefix cache, with what the drafter has left there.
        assert everything(run_all(engine, given, params)) == everything(plain)


def test_part_of_the_layers_is_right_more_often_than_by_chance(tiny_llama, make_engine):
    folder = tiny_llama(initializer_range=0.02, num_hidden_layers=2)
    engine = guided(make_engine, folder, first_layers(folder, 1))
    run_all(engine, prompts(20), greedy(30))
    stats = engine.stats()
    assert stats.accepted_draft_tokens > 10 * stats.draft_tokens / 512


def test_a_pool_that_runs_dry_loses_guesses_and_no_token(tiny_llama, make_engine):
    folder, given = tiny_llama(), prompts(8)
    plain = run_all(make_engine(folder), given, greedy(60))
    engine = guided(make_engine, folder, folder, 8, kv_cache_memory_bytes=200 * 1024, max_model_len=96)
    force_preemption(engine)
    assert everything(run_all(engine, given, greedy(60))) == everything(plain)
    assert engine.stats().num_preemptions > 0


def test_a_long_prompt_is_followed_in_pieces(tiny_llama, make_engine, monkeypatch):
    monkeypatch.setattr("llmq.runtime.speculative.pass_drafter.CATCH_UP_TOKENS", 16)
    folder, given = tiny_llama(), [prompts(1, 200)[0] * 8, *prompts(3)]
    given[0] = given[0][:150]
    plain = run_all(make_engine(folder), given, greedy(40))
    engine = guided(make_engine, folder, folder)
    assert everything(run_all(engine, given, greedy(40))) == everything(plain)
    stats = engine.stats()
    assert stats.accepted_draft_tokens == stats.draft_tokens > 0


def test_adaptive_guesses_change_no_token(tiny_llama, make_engine):
    folder, given = tiny_llama(), prompts(6)
    plain = run_all(make_engine(folder), given, greedy(60))
    engine = guided(make_engine, folder, folder, 8, adaptive=True)
    assert everything(run_all(engine, given, greedy(60))) == everything(plain)


@pytest.mark.parametrize("num_layers", [None, 1])
def test_passes_are_timed_before_it_serves_and_random_text_teaches_nothing(tiny_llama, make_engine, num_layers):
    folder = tiny_llama(num_hidden_layers=2)

    def made(adaptive: bool):
        drafts = {"draft_model": str(folder)} if num_layers is None else {"draft_layers": num_layers}
        speculation = Speculation(method="draft", num_tokens=4, adaptive=adaptive, **drafts)
        return make_engine(folder, speculation=speculation).executor.runner.drafter

    drafter, untried = made(adaptive=True), made(adaptive=False)
    assert 0.0 < drafter._price.seconds(1) <= drafter._price.seconds(16) < 1.0
    assert untried._price.seconds(16) == 0.0
    assert drafter._guesser.first_chance == untried._guesser.first_chance
    assert drafter._mean_answer == untried._mean_answer
    assert not drafter._texts


def test_grammars_and_penalties_with_a_drafter(tiny_llama, make_engine):
    from llmq.runtime.frontend.grammar import json_grammar

    folder, given = tiny_llama(), prompts(4)
    grammar = json_grammar({"type": "array", "items": {"enum": ["red", 7, None]}, "minItems": 2, "maxItems": 5})
    for changes in (
        {"grammar": grammar},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}},
    ):
        params = SamplingParams(temperature=0.8, seed=4, max_tokens=40, **changes)
        plain = run_all(make_engine(folder), given, params)
        engine = guided(make_engine, folder, folder)
        assert everything(run_all(engine, given, params)) == everything(plain)
        assert engine.stats().draft_tokens > 0


def other_words(folder, tmp_path):
    made = tmp_path / "other"
    shutil.copytree(folder, made)
    path = made / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    first, second = [word for word, token_id in sorted(words.items(), key=lambda pair: pair[1])][100:102]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return made


def test_what_cannot_guess_is_refused_in_words(tiny_llama, make_engine, tmp_path):
    folder = tiny_llama()
    with pytest.raises(InputError, match=r"its vocabulary is another one: token \d+ is '.*' here, there it is '.*'"):
        guided(make_engine, folder, other_words(folder, tmp_path))
