"""One bad request ends itself: its neighbours' tokens are what they would have been, and the engine goes on."""

import pytest
import torch
from engine_driver import greedy, run_all

from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling import sampler
from llmq.runtime.sampling_params import SamplingParams

BAD = 499
PROMPTS = [[(7 * index + 11 * position) % 480 + 3 for position in range(9 + 5 * index)] for index in range(7)]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch):
    """forwards(engine): its model raises, after it wrote K and V, for any batch that holds BAD. Counts the calls."""

    def break_model(engine) -> list[int]:
        model, sizes = engine.executor.runner.program.model, []
        original = model.forward

        def forward(inputs, store, attention):
            sizes.append(len(inputs.query_start_loc) - 1)
            hidden = original(inputs, store, attention)
            if BAD in inputs.token_ids.tolist():
                raise RuntimeError("the kernel cannot do that")
            return hidden

        monkeypatch.setattr(model, "forward", forward)
        return sizes

    return break_model


@pytest.mark.parametrize(
    "changes", [{}, {"kv_dtype": "int8"}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}], ids=repr
)
@pytest.mark.parametrize("culprits", [[0], [6], [2, 3], [1, 4, 5]])
def test_a_failed_forward_ends_its_culprits_only(tiny_llama, make_engine, forwards, changes, culprits):
    folder = tiny_llama()
    prompts = [[*prompt[:6], BAD, *prompt[6:]] if i in culprits else prompt for i, prompt in enumerate(PROMPTS)]
    params = [greedy(12) if i % 2 else SamplingParams(seed=i, max_tokens=12, ignore_eos=True) for i in range(7)]
    expected = run_all(make_engine(folder, **changes), prompts, params)
    engine = make_engine(folder, **changes)
    sizes = forwards(engine)
    made = run_all(engine, prompts, params)
    for index, (collected, alone) in enumerate(zip(made, expected, strict=True)):
        if index in culprits:
            assert collected.finish_reason == "error"
            assert "RuntimeError: the kernel cannot do that" in collected.error
            assert collected.token_ids == []
        else:
            assert collected.token_ids == alone.token_ids
            assert collected.error is None
    assert 1 in sizes
    assert run_all(engine, [PROMPTS[0]], params[0])[0].token_ids == expected[0].token_ids or 0 in culprits


def test_when_all_fail_all_are_told_and_the_engine_goes_on(tiny_llama, make_engine, forwards, monkeypatch):
    engine = make_engine(tiny_llama())
    with monkeypatch.context():
        sizes = forwards(engine)
        made = run_all(engine, [[BAD, *prompt] for prompt in PROMPTS[:4]], greedy(3))
    assert {collected.finish_reason for collected in made} == {"error"}
    assert sizes == [4, 2, 1, 1, 2, 1, 1]
    assert len(run_all(engine, PROMPTS[:2], greedy(3))[0].token_ids) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_failing_processor_ends_its_row_only(tiny_llama, make_engine, monkeypatch, temperature):
    folder = tiny_llama()
    # A bias of nothing: rows whose logits stay as they are see no processor.
    more = {"logit_bias": {3: 0.0}, "logprobs": 1}
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=8, ignore_eos=True, **more)
    expected = run_all(make_engine(folder), PROMPTS[:3], params)

    def broken(row, params, token_ids, num_prompt_tokens, eos_token_ids) -> None:
        if token_ids[:3] == PROMPTS[1][:3] and len(token_ids) == num_prompt_tokens + 4:
            raise ValueError("no such row")

    monkeypatch.setattr(sampler, "PROCESSORS", (*sampler.PROCESSORS, broken))
    made = run_all(make_engine(folder), PROMPTS[:3], params)
    assert [one.finish_reason for one in made] == ["length", "error", "length"]
    assert made[1].error == "ValueError: no such row"
    assert made[1].token_ids == expected[1].token_ids[:4]
    assert [made[i].token_ids for i in (0, 2)] == [expected[i].token_ids for i in (0, 2)]


def test_prompt_scoring_that_fails_ends_its_request_only(tiny_llama, make_engine):
    engine = make_engine(tiny_llama())

    def observer(request_id: str, position: int, logits: torch.Tensor) -> None:
        if request_id == "1":
            raise KeyError("unheard of")

    engine.observe_logits(observer)
    made = run_all(engine, PROMPTS[:3], greedy(4, prompt_logprobs=0))
    assert [one.finish_reason for one in made] == ["length", "error", "length"]
    assert [len(one.prompt_logprobs) for one in made] == [len(PROMPTS[0]) - 1, 0, len(PROMPTS[2]) - 1]


def test_nothing_to_choose_from_and_overflow_are_told(tiny_llama, make_engine, monkeypatch):
    engine = make_engine(tiny_llama())
    model = engine.executor.runner.program.model
    original = model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        made = original(hidden)
        made[0, 7], made[1] = torch.nan, -torch.inf
        return made

    monkeypatch.setattr(model, "logits", logits)
    made = run_all(engine, PROMPTS[:3], greedy(1))
    assert "not finite" in made[0].error
    assert "no token is left" in made[1].error
    assert made[2].finish_reason == "length"


def test_a_parent_that_fails_takes_its_forks_along(tiny_llama, make_engine, forwards):
    engine = make_engine(tiny_llama())
    forwards(engine)
    engine.add_request(
        EngineRequest(
            request_id="parent",
            prompt_token_ids=[BAD, 5],
            sampling_params=greedy(4),
            forks=[("a", 1), ("b", 2)],
        )
    )
    outputs = engine.step()
    assert [(one.request_id, one.finish_reason) for one in outputs] == [(n, "error") for n in ("parent", "a", "b")]
    assert not engine.has_unfinished_requests
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "int8"}, {"batch_invariant": True}], ids=repr)
def test_an_overflow_spoils_nobody_beside_it_and_nobody_after_it(tiny_llama, make_engine, changes, window):
    """What is not finite stays in the blocks of a failed request; 0 × NaN behind a mask would carry it over."""
    folder = tiny_llama(model_type="mistral", sliding_window=window) if window else tiny_llama()
    params = greedy(6)
    good = [PROMPTS[0][:5], PROMPTS[1], PROMPTS[6]]
    expected = [one.token_ids for one in run_all(make_engine(folder, **changes), good, params)]
    engine = make_engine(folder, **changes)
    model = engine.executor.runner.program.model
    model.embedding = model.embedding.clone()
    model.embedding[BAD] = torch.nan
    bad = [[*prompt, BAD, 7] for prompt in PROMPTS[3:]]  # most of the first blocks of the pool
    made = run_all(engine, [*bad, *good], params)
    assert ["not finite" in (one.error or "") for one in made] == [True] * 4 + [False] * 3
    assert [one.token_ids for one in made[4:]] == expected
    assert [one.token_ids for one in run_all(engine, good, params)] == expected
