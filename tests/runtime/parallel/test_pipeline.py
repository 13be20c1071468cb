"""Engines whose stages are processes: the tokens of one rank, several steps at once, and how they end."""

import os
import signal
import threading
import time
from collections import deque
from pathlib import Path

import pytest
from engine_driver import Collected, force_preemption, greedy, run_all
from random_weights import make, quantize_folder
from rank_children import children
from tiny_model import save_tiny_model

from llmq.profiles.errors import FailedError, InputError
from llmq.runtime.config import Speculation
from llmq.runtime.kernels import native
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

PROMPTS = [[(7 * row + 11 * place) % 480 + 3 for place in range(5 + 9 * row)] for row in range(6)]
PARAMS = [
    greedy(12, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=7, max_tokens=12, ignore_eos=True, top_p=0.9),
    greedy(12),
    SamplingParams(seed=8, max_tokens=12, ignore_eos=True, temperature=1.3, repetition_penalty=1.2),
    greedy(12, logit_bias={5: 3.0}),
    greedy(0, prompt_logprobs=0),
]


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2", num_hidden_layers=3)


@pytest.fixture
def staged(make_engine):
    """staged(folder, **EngineConfig fields): an engine of two stages, ended with the test."""
    engines = []

    def make(folder: Path, **changes):
        engines.append(make_engine(folder, **{"pipeline_parallel": 2, **changes}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def tokens(collected: list[Collected]) -> list[list[int]]:
    return [one.token_ids for one in collected]


def test_a_stage_computes_the_next_step_before_the_other_has_answered_the_last(qwen2, staged, make_engine, monkeypatch):
    engine, events, ahead = staged(qwen2), [], deque()
    runner = engine.executor.runner
    receive, execute = runner.program._link.receive, runner.execute

    def receive_two(into):
        """Before it computes the first step this stage takes the second one too, which must have been computed."""
        if not events:
            for num_tokens in (len(PROMPTS[0]), len(PROMPTS[1])):
                ahead.append(receive(into.new_empty(num_tokens, into.shape[1])))
                events.append(f"stage 0 has computed step {len(ahead)}")
        return ahead.popleft() if ahead else receive(into)

    def execute_and_say(plan):
        made = execute(plan)
        events.append(f"stage 1 has answered step {plan.step}")
        return made

    monkeypatch.setattr(runner.program._link, "receive", receive_two)
    monkeypatch.setattr(runner, "execute", execute_and_say)
    # Where they took turns, the second step would never come.
    watch = threading.Timer(60, engine.executor._thread.fail, [FailedError("the second step did not come")])
    watch.start()
    made = run_all(engine, PROMPTS[:2], greedy(8))
    watch.cancel()
    assert events[:4] == [
        "stage 0 has computed step 1",
        "stage 0 has computed step 2",
        "stage 1 has answered step 1",
        "stage 1 has answered step 2",
    ]
    assert tokens(made) == tokens(run_all(make_engine(qwen2), PROMPTS[:2], greedy(8)))


def numbers_of(fingerprint: dict[str, str]) -> dict[str, str]:
    return fingerprint | {"program": fingerprint["program"].partition(" (")[0]}


def test_requests_of_all_kinds_have_the_tokens_of_one_rank(qwen2, make_engine, staged):
    alone, together = make_engine(qwen2), staged(qwen2, max_num_batched_tokens=32, max_num_seqs=8)
    link = together.executor.runner.program._link
    run_all(together, PROMPTS[:1], greedy(5))
    assert link.counts == {"receive": 5} == {"receive": together.stats().num_steps}
    for _ in ("cold", "warm"):
        expected, made = run_all(alone, PROMPTS, PARAMS), run_all(together, PROMPTS, PARAMS)
        assert tokens(made) == tokens(expected)
        for one, other in zip(made, expected, strict=True):
            for scores in ("logprobs", "prompt_logprobs"):
                assert [s.logprob for s in getattr(one, scores)] == pytest.approx(
                    [s.logprob for s in getattr(other, scores)], abs=1e-5
                )
    assert link.counts == {"receive": together.stats().num_steps}
    # Stages decide no number; both run torch's program, each for a reason of its own.
    assert numbers_of(together.info.fingerprint) == numbers_of(alone.info.fingerprint)
    assert (together.info.num_ranks, together.info.num_stages) == (2, 2)
    assert together.info.weight_bytes == alone.info.weight_bytes


def test_chunks_of_one_prompt_follow_each_other_without_waiting(qwen2, make_engine, staged):
    engine, prompt = staged(qwen2, max_num_batched_tokens=16, max_num_seqs=2), [7, 8, 9, 10] * 20
    submit, in_flight = engine.executor.submit, []

    def submit_and_count(plan):
        in_flight.append((len(engine._pending), plan.scheduled[0].num_computed_tokens))
        return submit(plan)

    engine.executor.submit = submit_and_count
    made = run_all(engine, [prompt], greedy(3, prompt_logprobs=0))
    # (steps in flight before it, where its chunk begins): only the new token's steps wait for the one before.
    assert in_flight == [(0, 0), (1, 16), (1, 32), (1, 48), (1, 64), (0, 80), (0, 81)]
    expected = run_all(make_engine(qwen2), [prompt], greedy(3, prompt_logprobs=0))
    assert tokens(made) == tokens(expected)
    assert [s.logprob for s in made[0].prompt_logprobs] == pytest.approx(
        [s.logprob for s in expected[0].prompt_logprobs], abs=1e-5
    )


def test_preemption_forks_and_aborts_while_steps_are_in_flight(qwen2, make_engine, staged):
    alone = make_engine(qwen2)
    expected = tokens(run_all(alone, PROMPTS, greedy(40)))
    # Blocks of two of three layers: what the fuller stage holds.
    block_bytes = alone.info.kv_cache_bytes // alone.info.num_blocks * 2 // 3
    tight = staged(qwen2, kv_cache_memory_bytes=12 * block_bytes, max_model_len=96, max_num_batched_tokens=64)
    assert (tight.info.num_blocks, tight.info.kv_cache_bytes) == (12, 12 * block_bytes)
    force_preemption(tight)
    assert tokens(run_all(tight, PROMPTS, greedy(40))) == expected
    assert tight.stats().num_preemptions > 0
    params = SamplingParams(seed=0, max_tokens=9, ignore_eos=True)
    made = []
    for engine in (alone, tight):
        forks = [(f"fork {seed}", seed) for seed in (1, 2)]
        engine.add_request(
            EngineRequest(request_id="a", prompt_token_ids=PROMPTS[1], sampling_params=params, forks=forks)
        )
        engine.add_request(EngineRequest(request_id="b", prompt_token_ids=PROMPTS[2], sampling_params=params))
        texts = {name: Collected() for name in ("a", "b", "fork 1", "fork 2")}
        for step in range(100):
            for output in engine.step():
                texts[output.request_id].add(output)
            if step == 3:  # and the same name again, while a step of the old one may be in flight
                engine.abort(["b", "fork 2"])
                texts["b"] = Collected()
                engine.add_request(EngineRequest(request_id="b", prompt_token_ids=PROMPTS[3], sampling_params=params))
        made.append({name: text.token_ids for name, text in texts.items() if name != "fork 2"})
    assert made[0] == made[1]
    assert all(len(tokens) == 9 for tokens in made[0].values())


def plain(folder: Path) -> Path:
    return save_tiny_model(folder, "qwen2", dtype="bfloat16")


def mixture(folder: Path) -> Path:
    return save_tiny_model(folder, "mixtral", num_local_experts=4, num_experts_per_tok=2)


def in_four_bits(folder: Path) -> Path:
    def weight(out: int, in_: int, seed: int):
        return make("int", 4, "group", out, in_, seed, order=True)

    return quantize_folder(save_tiny_model(folder / "source", "qwen2"), folder / "made", "gptq", weight)


@pytest.mark.parametrize("make_model", [plain, mixture, in_four_bits])
def test_two_ranks_in_each_of_two_stages(tmp_path, make_engine, staged, make_model):
    folder = make_model(tmp_path)
    engine = staged(folder, tensor_parallel=2)
    program = engine.executor.runner.program
    counts = program.model.vocabulary.collectives.counts
    expected, made = (run_all(one, PROMPTS, greedy(8)) for one in (make_engine(folder), engine))
    assert tokens(made) == tokens(expected)
    # Of the last stage's one layer: a sum behind attention and one behind the MLP; words are gathered, not embedded.
    num_steps = engine.stats().num_steps
    assert counts == {"all_reduce": 2 * num_steps, "gather": num_steps}
    assert program._link.counts == {"receive": num_steps}
    assert len(children()) == 3


@pytest.mark.skipif(native is None, reason="the native kernels are not there")
def test_native_kernels_in_each_stage(qwen2, make_engine, staged):
    """The steps of a stage run on torch, which says so; its linears and its attention are native, to the last bit."""
    alone, together = (make(qwen2, dtype="bf16", kernels="native") for make in (make_engine, staged))
    numerics = together.info.fingerprint
    assert numerics["program"] == "torch (it is a stage of several)"
    assert "native" in numerics["linear_kernels"]
    assert "native" in numerics["attention_kernel"]
    assert numerics | {"program": "native"} == alone.info.fingerprint
    made = [run_all(engine, PROMPTS, greedy(0, prompt_logprobs=0)) for engine in (alone, together)]
    for one, other in zip(*made, strict=True):
        pairs = zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 0.5


def test_guessed_tokens(qwen2, make_engine, staged):
    repetitive = [[5, 6, 7, 8] * 6, [9, 10, 11] * 9]
    expected = tokens(run_all(make_engine(qwen2), repetitive, greedy(40)))
    engine = staged(qwen2, speculation=Speculation(method="ngram", num_tokens=3))
    assert tokens(run_all(engine, repetitive, greedy(40))) == expected
    assert engine.stats().draft_tokens > 0


def go_on(engine, deadline_s: float, *, is_busy: bool) -> None:
    while time.monotonic() < deadline_s:
        engine.step() if is_busy else time.sleep(0.05)
        engine.check()


@pytest.mark.parametrize("when", ["busy", "at rest"])
def test_a_stage_that_is_killed_ends_the_engine_with_its_reason(qwen2, staged, when):
    engine = staged(qwen2, pipeline_parallel=3)
    victim = children()[-1]  # of the first stage
    words = rf"the process of rank 2 \(pid {victim}\) ended by signal 9"
    if when == "busy":
        for name, prompt in zip("ab", PROMPTS, strict=False):
            engine.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=greedy(200)))
        engine.step()
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(FailedError, match=words):
        go_on(engine, started + 30, is_busy=when == "busy")
    assert time.monotonic() - started < 20
    engine.close()
    assert children() == []


def test_a_forward_that_fails_on_the_last_stage_ends_the_others(qwen2, staged, monkeypatch):
    engine = staged(qwen2)
    monkeypatch.setattr(engine.executor.runner.program._program, "forward", lambda inputs: 1 / 0)
    for name, prompt in zip("ab", PROMPTS, strict=False):
        engine.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=greedy(200)))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(ZeroDivisionError):  # of the step that was in flight behind it too
        engine.step()
    engine.close()
    assert children() == []


def test_more_stages_than_layers_start_no_process(qwen2, make_engine):
    with pytest.raises(InputError, match=r"--pp 4: a stage holds one layer or more.*valid: 1 to 3"):
        make_engine(qwen2, pipeline_parallel=4)
    assert children() == []
