"""The first layers of a model guess for all of it: over its own K and V, and without a trace in the text."""

import pytest
from drafters import SAMPLED, everything, first_layers, guided, prompts
from engine_driver import force_preemption, greedy, run_all
from family_cases import CASES
from tiny_model import save_tiny_model

from llmq.profiles.errors import InputError
from llmq.runtime.config import Speculation
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams


def by_layers(make_engine, folder, num_layers: int = 1, k: int = 4, *, adaptive: bool = False, **changes):
    speculation = Speculation(method="draft", num_tokens=k, draft_layers=num_layers, adaptive=adaptive)
    return make_engine(folder, speculation=speculation, **changes)


def counted(engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.draft_tokens, stats.accepted_draft_tokens


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("params", [greedy(30), SAMPLED], ids=["greedy", "sampled"])
def test_guesses_are_those_of_a_model_of_the_first_layers(tiny_llama, make_engine, params, window):
    """That model has K and V of its own, which nobody else writes: an oracle for what is kept in the model's."""
    changes = {} if window is None else {"model_type": "mistral", "sliding_window": window}
    folder, given = tiny_llama(num_hidden_layers=3, initializer_range=0.02, **changes), prompts(12, 60)
    plain = run_all(make_engine(folder), given, params)
    for count in (1, 2):
        own, other = by_layers(make_engine, folder, count), guided(make_engine, folder, first_layers(folder, count))
        for _ in ("cold", "from the prefix cache"):
            assert everything(run_all(own, given, params)) == everything(plain)
            run_all(other, given, params)
            assert counted(own) == counted(other)
        assert own.stats().accepted_draft_tokens > 10 * own.stats().draft_tokens / 512
        alone = make_engine(folder).info
        assert (own.info.kv_cache_bytes, own.info.weight_bytes) == (alone.kv_cache_bytes, alone.weight_bytes)


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=repr)
def test_every_family_ends_early(tmp_path, make_engine, model_type, changes):
    folder, given = save_tiny_model(tmp_path, model_type, **changes), prompts(6, 40)
    plain = run_all(make_engine(folder), given, greedy(16))
    engine = by_layers(make_engine, folder)
    assert everything(run_all(engine, given, greedy(16))) == everything(plain)
    assert engine.stats().draft_tokens > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"kv_dtype": "int8"},
        {"kv_cache_memory_bytes": 96 * 1024, "max_model_len": 96},
    ],
    ids=repr,
)
def test_schedules_and_dry_pools_change_no_token(tiny_llama, make_engine, changes):
    folder, given = tiny_llama(), prompts(8)
    plain = run_all(make_engine(folder, kv_dtype=changes.get("kv_dtype", "auto")), given, greedy(60))
    for adaptive in (False, True):
        engine = by_layers(make_engine, folder, k=8, adaptive=adaptive, **changes)
        if "kv_cache_memory_bytes" in changes:
            force_preemption(engine)
        assert everything(run_all(engine, given, greedy(60))) == everything(plain)


def test_what_guessing_wrote_never_enters_the_prefix_cache(tiny_llama, make_engine):
    """Every text is asked again as a prompt: what the cache has of it is what it was computed to be."""
    folder, given = tiny_llama(), prompts(8)
    engine = by_layers(make_engine, folder, k=8)
    made = run_all(engine, given, greedy(40))
    longer = [[*prompt, *one.token_ids] for prompt, one in zip(given, made, strict=True)]
    expected = run_all(make_engine(folder, enable_prefix_caching=False), longer, greedy(10))
    again = run_all(engine, longer, greedy(10))
    assert [one.token_ids for one in again] == [one.token_ids for one in expected]
    assert all(one.num_cached_tokens >= len(text) // 16 * 16 - 16 for one, text in zip(again, longer, strict=True))


def test_forks_write_no_guess_into_each_others_blocks(tiny_llama, make_engine):
    folder, given = tiny_llama(initializer_range=0.02), prompts(4)

    def run(engine) -> dict[str, list[int]]:
        made: dict[str, list[int]] = {}
        for index, prompt in enumerate(given):
            params = SamplingParams(temperature=1.0, seed=index, max_tokens=30, ignore_eos=True)
            forks = [(f"{index}/{n}", 100 + n) for n in range(3)]
            name = str(index)
            engine.add_request(
                EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, forks=forks)
            )
        while engine.has_unfinished_requests:
            for output in engine.step():
                made.setdefault(output.request_id, []).extend(output.new_token_ids)
        return made

    expected = run(make_engine(folder))
    for changes in ({}, {"kv_cache_memory_bytes": 128 * 1024, "max_model_len": 96}):
        engine = by_layers(make_engine, folder, **changes)
        assert run(engine) == expected
        assert engine.stats().accepted_draft_tokens > 0


def test_by_the_native_program(tmp_path, make_engine):
    from llmq.runtime.kernels import native, why_absent

    if native is None:
        pytest.skip(why_absent)
    folder = save_tiny_model(tmp_path, "llama", dtype="bfloat16", num_hidden_layers=3)
    given = prompts(6, 40)
    plain = run_all(make_engine(folder, dtype="bf16"), given, greedy(24))
    engine = by_layers(make_engine, folder, 2, dtype="bf16")
    assert engine.executor.runner.drafter.name == "its first 2 layers by native"
    assert everything(run_all(engine, given, greedy(24))) == everything(plain)
    assert engine.stats().accepted_draft_tokens > 0


def test_what_cannot_be_is_refused(tiny_llama, make_engine):
    folder = tiny_llama()
    with pytest.raises(InputError, match="--draft-layers 2: 1 to 1 of this model's 2 layers"):
        by_layers(make_engine, folder, 2)
