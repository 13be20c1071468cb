"""Engines whose ranks are processes: the tokens of one rank, and how they end."""

import os
import signal
import time
from pathlib import Path

import pytest
from engine_driver import Collected, force_preemption, greedy, run_all
from random_weights import make, quantize_folder
from rank_children import children
from tiny_model import save_tiny_model

from llmq.profiles.errors import FailedError, InputError
from llmq.runtime.config import Speculation
from llmq.runtime.kernels import native
from llmq.runtime.parallel import rank_processes
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

PROMPTS = [[(7 * row + 11 * place) % 480 + 3 for place in range(5 + 9 * row)] for row in range(6)]


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture
def ranks(make_engine):
    """ranks(folder, **EngineConfig fields): an engine of two, ended with the test."""
    engines = []

    def make(folder: Path, **changes):
        engines.append(make_engine(folder, **{"tensor_parallel": 2, **changes}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def step_until_done(engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()


def check_for_seconds(engine, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        engine.check()
        time.sleep(0.05)


def test_requests_of_all_kinds_have_the_tokens_of_one_rank(qwen2, make_engine, ranks):
    params = [
        greedy(12, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=7, max_tokens=12, ignore_eos=True, top_p=0.9),
        greedy(12),
        SamplingParams(seed=8, max_tokens=12, ignore_eos=True, temperature=1.3, repetition_penalty=1.2),
        greedy(12, logit_bias={5: 3.0}),
        greedy(0, prompt_logprobs=0),
    ]
    alone, together = make_engine(qwen2), ranks(qwen2, max_num_batched_tokens=32, max_num_seqs=8)
    counts = together.executor.runner.program.model.vocabulary.collectives.counts
    run_all(together, PROMPTS[:1], greedy(5))
    assert together.stats().num_steps == 5
    # One for the embedding, and in each of two layers one behind attention and one behind the MLP.
    assert counts == {"all_reduce": 5 * (1 + 2 * 2), "gather": 5}
    for _ in ("cold", "warm"):
        expected, made = run_all(alone, PROMPTS, params), run_all(together, PROMPTS, params)
        assert [one.token_ids for one in made] == [one.token_ids for one in expected]
        for one, other in zip(made, expected, strict=True):
            for scores in ("logprobs", "prompt_logprobs"):
                assert [s.logprob for s in getattr(one, scores)] == pytest.approx(
                    [s.logprob for s in getattr(other, scores)], abs=1e-4
                )
    assert together.info.fingerprint == alone.info.fingerprint | {"tensor_parallel": "2"}
    assert together.info.weight_bytes < 1.1 * alone.info.weight_bytes


def test_preemption_forks_and_aborts(qwen2, make_engine, ranks):
    alone = make_engine(qwen2)
    expected = [made.token_ids for made in run_all(alone, PROMPTS, greedy(40))]
    block_bytes = alone.info.kv_cache_bytes // alone.info.num_blocks // 2
    tight = ranks(qwen2, kv_cache_memory_bytes=12 * block_bytes, max_model_len=96, max_num_batched_tokens=64)
    assert tight.info.num_blocks == 12
    force_preemption(tight)
    assert [made.token_ids for made in run_all(tight, PROMPTS, greedy(40))] == expected
    assert tight.stats().num_preemptions > 0
    made = []
    for engine in (alone, tight):
        forks = [(f"fork {seed}", seed) for seed in (1, 2)]
        params = SamplingParams(seed=0, max_tokens=9, ignore_eos=True)
        engine.add_request(
            EngineRequest(request_id="a", prompt_token_ids=PROMPTS[1], sampling_params=params, forks=forks)
        )
        engine.add_request(EngineRequest(request_id="b", prompt_token_ids=PROMPTS[2], sampling_params=params))
        texts = {name: Collected() for name in ("a", "b", "fork 1", "fork 2")}
        for step in range(100):
            for output in engine.step():
                texts[output.request_id].add(output)
            if step == 3:
                engine.abort(["b", "fork 2"])
        made.append({name: text.token_ids for name, text in texts.items() if name in ("a", "fork 1")})
    assert made[0] == made[1]
    assert all(len(tokens) == 9 for tokens in made[0].values())


@pytest.mark.parametrize(
    ("format_name", "bits", "more"),
    [
        ("compressed-tensors", 4, {}),
        ("awq", 4, {"zero": "int"}),
        ("gptq_v2", 4, {"zero": "int", "order": True}),
        ("gptq_v2", 3, {"zero": "int"}),
    ],
)
def test_packed_weights_read_by_each_process(tmp_path, make_engine, ranks, format_name, bits, more):
    source = save_tiny_model(tmp_path / "source", "qwen3", num_hidden_layers=3)

    def weight(out: int, in_: int, seed: int):
        return make("int", bits, "group", out, in_, seed, group_size=32, **more)

    folder = quantize_folder(source, tmp_path / "made", format_name, weight)
    expected, made = (run_all(start(folder), PROMPTS, greedy(16)) for start in (make_engine, ranks))
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]


def test_batch_invariance_over_ranks(qwen2, ranks):
    """To the last bit, whatever runs beside it: parts are summed in the order of ranks."""
    engine = ranks(qwen2, batch_invariant=True, enable_prefix_caching=False)
    params = greedy(6, logprobs=0)
    alone = run_all(engine, PROMPTS[3:4], params)[0]
    beside = run_all(engine, PROMPTS, params)[3]
    assert [one.logprob for one in alone.logprobs] == [one.logprob for one in beside.logprobs]


def test_a_rank_that_is_killed_ends_the_engine_with_its_reason(qwen2, ranks):
    engine = ranks(qwen2)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=PROMPTS[0], sampling_params=greedy(200)))
    engine.step()
    (victim,) = children()
    os.kill(victim, signal.SIGKILL)
    words = rf"the process of rank 1 \(pid {victim}\) ended by signal 9"
    started = time.monotonic()
    with pytest.raises(FailedError, match=words):
        step_until_done(engine)
    assert time.monotonic() - started < 10
    with pytest.raises(FailedError, match=words):
        engine.check()
    engine.close()
    assert children() == []


def test_a_rank_that_dies_at_rest_is_noticed(qwen2, ranks):
    engine = ranks(qwen2)
    engine.check()
    os.kill(children()[-1], signal.SIGKILL)
    with pytest.raises(FailedError, match="ended by signal 9"):
        check_for_seconds(engine, 10)


def test_a_forward_that_fails_on_the_first_rank_ends_the_others(qwen2, ranks, monkeypatch):
    engine = ranks(qwen2)
    monkeypatch.setattr(engine.executor.runner.program, "forward", lambda inputs: 1 / 0)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=PROMPTS[0], sampling_params=greedy(200)))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.close()
    assert children() == []


def test_what_cannot_be_split_starts_no_process(qwen2, make_engine):
    with pytest.raises(InputError, match=r"--tp 3 does not split 4 heads.*valid: 1, 2, 4"):
        make_engine(qwen2, tensor_parallel=3)
    assert children() == []


def test_a_rank_that_is_killed_while_it_loads_is_told(qwen2, make_engine, monkeypatch):
    start = rank_processes._start

    def start_and_kill(number: int):
        rank = start(number)
        os.kill(rank.process.pid, signal.SIGKILL)
        return rank

    monkeypatch.setattr(rank_processes, "_start", start_and_kill)
    with pytest.raises(FailedError, match=r"the process of rank 1 \(pid \d+\) ended by signal 9"):
        make_engine(qwen2, tensor_parallel=2)
    assert children() == []


def test_a_rank_that_cannot_load_is_told_in_words(qwen2, make_engine, monkeypatch):
    """A file that changes under its feet: the first rank has read its headers, the other finds none."""
    start = rank_processes.Start
    gone = lambda config, rank: start(type(config)(model="/nowhere", tensor_parallel=2), rank)  # noqa: E731
    monkeypatch.setattr(rank_processes, "Start", gone)
    with pytest.raises(InputError, match="rank 1: no file /nowhere"):
        make_engine(qwen2, tensor_parallel=2)
    assert children() == []


def test_guessed_tokens_over_ranks(qwen2, make_engine, ranks):
    speculation = Speculation(method="ngram", num_tokens=3)
    repetitive = [[5, 6, 7, 8] * 6, [9, 10, 11] * 9]
    expected = [made.token_ids for made in run_all(make_engine(qwen2), repetitive, greedy(40))]
    engine = ranks(qwen2, speculation=speculation)
    assert [made.token_ids for made in run_all(engine, repetitive, greedy(40))] == expected
    assert engine.stats().draft_tokens > 0


@pytest.mark.skipif(native is None, reason="the native kernels are not there")
def test_native_kernels_on_each_rank(qwen2, make_engine, ranks):
    """In bf16, whose sums over ranks are rounded once more."""
    alone, together = (make(qwen2, dtype="bf16", kernels="native") for make in (make_engine, ranks))
    numerics = together.info.fingerprint
    assert numerics["program"] == "torch (ranks share it, and sum by torch)"
    assert "native" in numerics["linear_kernels"]
    assert "native" in numerics["attention_kernel"]
    params = greedy(0, prompt_logprobs=0)
    for one, other in zip(*(run_all(engine, PROMPTS, params) for engine in (alone, together)), strict=True):
        pairs = zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 0.5
