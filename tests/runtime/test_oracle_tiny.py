"""The engine against transformers on random models: whatever the scheduling, the same tokens in float32."""

import random

import pytest
from engine_driver import Reference, force_preemption, greedy, run_all

from llmq.runtime import model_runner

FAMILIES = [
    {},
    {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    {"head_dim": 32, "num_key_value_heads": 1},
    {"model_type": "mistral"},
    {"model_type": "mistral", "sliding_window": 24},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    {"model_type": "qwen3"},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        }
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        }
    },
]

SCHEDULES = {
    "alone": {"max_num_seqs": 1},
    "together": {},
    "chunks of 32": {"max_num_batched_tokens": 32, "max_num_seqs": 16},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "no prefix cache": {"enable_prefix_caching": False},
}


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 512) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_greedy_tokens_equal_transformers(tiny_llama, make_engine, family):
    folder = tiny_llama(**family)
    given = prompts(6)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, 40) for prompt in given]
    for changes in ({}, {"max_num_batched_tokens": 32, "max_num_seqs": 16}):
        engine = make_engine(folder, **changes)
        for _ in ("cold", "warm"):
            assert [made.token_ids for made in run_all(engine, given, greedy(40))] == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_give_the_same_tokens(tiny_llama, make_engine, name):
    folder = tiny_llama()
    given = prompts(20)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, 24) for prompt in given]
    order = list(range(20))
    random.Random(1).shuffle(order)
    made = run_all(make_engine(folder, **SCHEDULES[name]), [given[index] for index in order], greedy(24))
    assert [collected.token_ids for collected in made] == [expected[index] for index in order]


@pytest.mark.parametrize("window", [None, 24])
def test_preemption_changes_no_token(tiny_llama, make_engine, window):
    folder = tiny_llama(model_type="mistral", sliding_window=window)
    given = prompts(12, longest=60)
    expected = [made.token_ids for made in run_all(make_engine(folder), given, greedy(60))]
    roomy = make_engine(folder)
    block_bytes = roomy.info.kv_cache_bytes // roomy.info.num_blocks
    tight = make_engine(folder, kv_cache_memory_bytes=20 * block_bytes, max_model_len=128, max_num_batched_tokens=64)
    force_preemption(tight)
    assert [made.token_ids for made in run_all(tight, given, greedy(60))] == expected
    assert tight.stats().num_preemptions > 0


def test_a_warm_prefix_is_hit_and_changes_no_token(tiny_llama, make_engine):
    folder = tiny_llama()
    engine = make_engine(folder)
    prefix = prompts(1, longest=90)[0] * 3
    given = [[*prefix[:100], token] for token in range(3, 9)]
    reference = Reference(folder)
    expected = [reference.greedy(prompt, 16) for prompt in given]
    first = run_all(engine, given[:1], greedy(16))
    rest = run_all(engine, given[1:], greedy(16))
    assert [made.token_ids for made in first + rest] == expected
    assert first[0].num_cached_tokens == 0
    assert [made.num_cached_tokens for made in rest] == [96] * 5  # 6 whole blocks of the 100 shared tokens


@pytest.mark.parametrize("length", [16, 32, 33])
def test_a_prompt_of_whole_blocks_leaves_a_token_to_compute(tiny_llama, make_engine, length):
    engine = make_engine(tiny_llama())
    params = greedy(8, logprobs=1)
    cold, warm = (run_all(engine, [[504] * length], params)[0] for _ in range(2))
    assert warm.token_ids == cold.token_ids
    assert warm.num_cached_tokens == (length - 1) // 16 * 16
    for before, after in zip(cold.logprobs, warm.logprobs, strict=True):
        assert after.logprob == pytest.approx(before.logprob, abs=1e-4)


@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}], ids=["whole", "chunked"])
def test_prompt_logprobs_equal_transformers(tiny_llama, make_engine, changes):
    folder = tiny_llama()
    given = prompts(4)
    engine = make_engine(folder, **changes)
    reference = Reference(folder)
    for start in (1, 20):
        params = greedy(0, prompt_logprobs=3, prompt_logprobs_start=start)
        for _ in ("cold", "warm"):  # what lies before `start` may be a hit, what lies behind is computed
            for prompt, made in zip(given, run_all(engine, given, params), strict=True):
                expected = reference.log_probs(prompt)
                assert made.finish_reason == "length"
                assert made.token_ids == []
                assert [entry.token_id for entry in made.prompt_logprobs] == prompt[start:]
                for position, entry in enumerate(made.prompt_logprobs, start):
                    row = expected[position - 1]
                    assert entry.logprob == pytest.approx(row[prompt[position]].item(), abs=1e-4)
                    assert entry.rank == int((row > row[prompt[position]]).sum()) + 1
                    assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


def test_prompt_logprobs_survive_preemption(tiny_llama, make_engine):
    folder = tiny_llama()
    given = prompts(8, longest=60)
    params = greedy(40, prompt_logprobs=0, logprobs=0)
    roomy = make_engine(folder)
    expected = run_all(roomy, given, params)
    block_bytes = roomy.info.kv_cache_bytes // roomy.info.num_blocks
    tight = make_engine(
        folder, kv_cache_memory_bytes=9 * block_bytes, max_model_len=112, max_num_batched_tokens=8, max_num_seqs=8
    )
    force_preemption(tight)
    made = run_all(tight, given, params)
    assert tight.stats().num_preemptions > 0
    for before, after in zip(expected, made, strict=True):
        assert [entry.token_id for entry in after.prompt_logprobs] == [e.token_id for e in before.prompt_logprobs]
        assert [entry.logprob for entry in after.logprobs] == pytest.approx(
            [entry.logprob for entry in before.logprobs], abs=1e-4
        )


def test_every_logit_is_observed_once(tiny_llama, make_engine):
    folder = tiny_llama()
    prompt = prompts(1)[0] * 2
    engine = make_engine(folder, max_num_batched_tokens=16, max_num_seqs=4)
    seen = {}

    def observe(request_id, position, logits):
        for row, values in enumerate(logits):
            assert seen.setdefault(position + row, values) is values

    engine.observe_logits(observe)
    run_all(engine, [prompt], greedy(0, prompt_logprobs=0))
    expected = Reference(folder).log_probs(prompt)
    assert sorted(seen) == list(range(len(prompt) - 1))
    for position, logits in seen.items():
        assert logits.log_softmax(-1).tolist() == pytest.approx(expected[position].tolist(), abs=1e-4)


def test_scoring_computes_no_token_whose_successor_nobody_asks_for(tiny_llama, make_engine):
    engine = make_engine(tiny_llama())
    for length, start, computed in [(33, 33, 32), (33, 33, 16), (49, 40, 16), (17, 17, 16), (1, 1, 1)]:
        before = engine.stats().prompt_tokens
        params = greedy(0, prompt_logprobs=0, prompt_logprobs_start=start)
        (made,) = run_all(engine, [[504] * length], params)
        assert (made.finish_reason, len(made.prompt_logprobs)) == ("length", length - start)
        assert engine.stats().prompt_tokens - before == computed


def test_the_scored_rows_of_a_step_go_through_the_head_together(tiny_llama, make_engine, monkeypatch):
    folder = tiny_llama()
    given = [[(7 * index + 11 * position) % 480 + 3 for position in range(9 + 5 * index)] for index in range(5)]
    starts = [len(prompt) - 1 - index for index, prompt in enumerate(given)]
    params = [greedy(0, prompt_logprobs=index, prompt_logprobs_start=start) for index, start in enumerate(starts)]
    engine = make_engine(folder)
    model, sizes = engine.executor.runner.program.model, []
    original = model.logits

    def logits(hidden):
        sizes.append(len(hidden))
        return original(hidden)

    monkeypatch.setattr(model, "logits", logits)
    monkeypatch.setattr(model_runner, "LOGITS_TILE", 4)
    made = run_all(engine, given, params)
    assert sizes == [4, 4, 4, 3]  # 1 + 2 + 3 + 4 + 5 rows, split where a tile ends and not where a request does
    reference = Reference(folder)
    for index, (prompt, start, one) in enumerate(zip(given, starts, made, strict=True)):
        rows = reference.log_probs(prompt)[start - 1 : -1]
        expected = [row[token].item() for row, token in zip(rows, prompt[start:], strict=True)]
        assert [entry.logprob for entry in one.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
        assert [len(entry.top) for entry in one.prompt_logprobs] == [index] * (index + 1)


def test_the_last_mlp_computes_what_is_read_of_it(tiny_llama, make_engine):
    folder = tiny_llama()
    prompt = [(11 * position) % 480 + 3 for position in range(40)]
    engine = make_engine(folder, max_num_batched_tokens=16, max_num_seqs=4)
    last, sizes = engine.executor.runner.program.model.blocks[-1].part, []
    original = last.activation

    def activation(x):
        sizes.append(len(x))
        return original(x)

    last.activation = activation
    (made,) = run_all(engine, [prompt], greedy(3, prompt_logprobs=0, prompt_logprobs_start=30))
    assert sizes == [3, 8, 1, 1]  # nothing of the first 16, scored rows 29 to 31 and 32 to 38, and each that is sampled
    reference = Reference(folder)
    assert made.token_ids == reference.greedy(prompt, 3)
    rows = reference.log_probs(prompt)[29:-1]
    expected = [row[token].item() for row, token in zip(rows, prompt[30:], strict=True)]
    assert [entry.logprob for entry in made.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
