"""The next step scheduled and launched before the last one's tokens are read: the same tokens, and the same cache."""

import msgspec
import pytest
from engine_driver import Collected, force_preemption, greedy, run_all

from llmq.profiles.errors import InputError
from llmq.runtime.config import Speculation
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling.sampler import LaunchedSample
from llmq.runtime.sampling_params import SamplingParams

PROMPTS = [[(7 * row + 11 * place) % 480 + 3 for place in range(5 + 9 * row)] for row in range(6)]
KEPT = ("token_ids", "finish_reason", "num_cached_tokens", "error")


@pytest.fixture
def engines(make_engine, tiny_llama):
    """engines(**EngineConfig fields): one that knows each token before the next step, and one that does not."""

    def make(**changes):
        fields = {"max_num_batched_tokens": 24, "max_num_seqs": 4} | changes
        return [make_engine(tiny_llama(), overlap_steps=overlaps, **fields) for overlaps in (False, True)]

    return make


def unread(engine, count):
    """Count in `count` the requests that a launch computes an unread token of."""
    runner = engine.executor.runner
    launch = runner.launch

    def counted(plan):
        names = {item.request_id for item in plan.scheduled}
        known = {name: request for name, request in runner._requests.items() if name in names}
        count.append(sum(request.unknown is not None for request in known.values()))
        return launch(plan)

    runner.launch = counted


def assert_equal(made, expected):
    for one, other in zip(made, expected, strict=True):
        for name in KEPT:
            assert getattr(one, name) == getattr(other, name), name
        for name in ("logprobs", "prompt_logprobs"):
            made, expected = ([score.logprob for score in getattr(which, name)] for which in (one, other))
            assert made == pytest.approx(expected, abs=1e-4), name  # steps have other batches: sums in another order


def test_tokens_of_all_kinds_of_requests(engines):
    plain, overlapping = engines()
    params = [
        greedy(9),
        SamplingParams(seed=1, max_tokens=12, top_p=0.8, top_k=50, logprobs=2),
        SamplingParams(seed=2, max_tokens=1, min_p=0.1),
        SamplingParams(seed=3, max_tokens=8, logit_bias={5: 3.0}, min_tokens=4, prompt_logprobs=1),
        # Who has to know its last token waits for it, and nobody else does.
        SamplingParams(seed=4, max_tokens=7, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(seed=5, max_tokens=7, presence_penalty=0.5, frequency_penalty=0.5, ignore_eos=True),
    ]
    expected, count = run_all(plain, PROMPTS, params), []
    unread(overlapping, count)
    assert_equal(run_all(overlapping, PROMPTS, params), expected)
    assert sum(count) > 15
    assert overlapping.stats().generation_tokens == plain.stats().generation_tokens


def test_who_must_know_its_last_token_is_in_no_step_before(engines):
    _, overlapping = engines()
    count = []
    unread(overlapping, count)
    run_all(overlapping, PROMPTS[:2], greedy(5, repetition_penalty=1.2))
    assert sum(count) == 0
    run_all(overlapping, PROMPTS[:1], greedy(5))
    assert sum(count) == 4  # of five tokens the last is computed by nobody


def test_a_token_that_ends_a_request_is_found_late_and_nothing_behind_it_is_kept(engines):
    plain, overlapping = engines()
    texts, _ = ([one.token_ids for one in run_all(engine, PROMPTS[:3], greedy(30))] for engine in (plain, overlapping))
    for at in (0, 3, 10, 11, 12):  # the blocks are of 16 tokens, the first prompt of 5: 11 is the last of a block
        params = [msgspec.structs.replace(greedy(30), stop_token_ids=frozenset([text[at]]), seed=at) for text in texts]
        ended, made = (run_all(engine, PROMPTS[:3], params) for engine in (plain, overlapping))
        assert_equal(made, ended)
        assert {one.finish_reason for one in made} == {"stop"}
        # Whoever goes on from there finds in the cache what the other engine's holds, and the same tokens.
        longer = [[*prompt, *one.token_ids, 7, 8, 9] for prompt, one in zip(PROMPTS, ended, strict=False)]
        assert_equal(*(run_all(engine, longer, greedy(4)) for engine in (overlapping, plain)))


def test_the_longest_requests_end_by_their_length(engines):
    plain, overlapping = engines(max_model_len=40)
    assert_equal(*(run_all(engine, PROMPTS[:4], greedy(100)) for engine in (overlapping, plain)))


def test_a_pool_that_runs_dry(engines):
    plain, overlapping = engines(max_num_batched_tokens=64, kv_cache_memory_bytes=14 * 16 * 512, max_model_len=128)
    force_preemption(plain), force_preemption(overlapping)
    params = [greedy(60), SamplingParams(seed=1, max_tokens=50, ignore_eos=True), greedy(40), greedy(70)]
    expected, made = (run_all(engine, PROMPTS[:4], params) for engine in (plain, overlapping))
    assert overlapping.stats().num_preemptions > 0
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]


def drive(engine, params, aborts):
    """All prompts; after a step of `aborts` its request is aborted. (what each brought, free blocks)."""
    collected = [Collected() for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        forks = [("6", 11), ("7", 12)] if index == 1 else []
        engine.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling_params=params,
                arrival_time_s=index,
                forks=forks,
            )
        )
    collected += [Collected(), Collected()]
    step = 0
    while engine.has_unfinished_requests:
        outputs, step = engine.step(), step + 1
        if step in aborts:
            outputs += engine.abort([aborts[step]])
        for output in outputs:
            collected[int(output.request_id)].add(output)
    return collected


def test_aborts_and_forks(engines):
    plain, overlapping = engines(max_num_seqs=8, max_num_batched_tokens=64)
    params = SamplingParams(seed=9, max_tokens=12, ignore_eos=True)
    expected = drive(plain, params, {})
    made = drive(overlapping, params, {3: "0", 5: "4", 8: "6"})
    for index, (one, other) in enumerate(zip(made, expected, strict=True)):
        if index in (0, 4, 6):
            assert one.finish_reason == "abort"
            assert one.token_ids == other.token_ids[: len(one.token_ids)]
            assert len(one.token_ids) < 12
        else:
            assert one.token_ids == other.token_ids
    stats = overlapping.stats()
    assert stats.num_free_blocks == stats.num_blocks
    # Whoever is aborted last leaves steps in flight behind, and the next request finds them.
    overlapping.add_request(EngineRequest(request_id="0", prompt_token_ids=PROMPTS[0], sampling_params=params))
    overlapping.step(), overlapping.step()
    overlapping.abort(["0"])
    assert_equal(run_all(overlapping, PROMPTS, greedy(6)), run_all(plain, PROMPTS, greedy(6)))


def test_a_step_is_launched_before_the_last_one_is_read(engines, monkeypatch):
    _, overlapping = engines()
    events, launch, read = [], overlapping.executor.runner.launch, LaunchedSample.read
    overlapping.executor.runner.launch = lambda plan: (events.append("launch"), launch(plan))[1]
    monkeypatch.setattr(LaunchedSample, "read", lambda sample: (events.append("read"), read(sample))[1])
    run_all(overlapping, PROMPTS[:1], greedy(5))
    assert events == ["launch", "launch", "read", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_a_request_that_fails_has_failed_in_the_next_step_too(engines):
    """Logits that are not finite are found when they are read, with the request's next step in flight."""
    plain, overlapping = engines()
    expected, runner = run_all(plain, PROMPTS[:3], greedy(8)), overlapping.executor.runner
    logits, calls = runner.program.logits, []

    def broken(hidden):
        made = logits(hidden)
        calls.append(len(hidden))
        if len(calls) == 4:
            made[0] = float("nan")
        return made

    runner.program.logits = broken
    made = run_all(overlapping, PROMPTS[:3], greedy(8))
    failed = [one for one in made if one.error is not None]
    assert len(failed) == 1
    assert "not finite" in failed[0].error
    for one, other in zip(made, expected, strict=True):
        if one.error is None:
            assert one.token_ids == other.token_ids


def test_a_forward_that_fails_leaves_no_token_for_the_step_behind_it(engines):
    plain, overlapping = engines()
    expected, program = run_all(plain, PROMPTS[:2], greedy(8)), overlapping.executor.runner.program
    forward = program.forward

    def broken(inputs):
        if 19 in inputs.attention[0].seq_lens:  # the second one's
            raise RuntimeError("that cannot be computed")
        return forward(inputs)

    program.forward = broken
    made = run_all(overlapping, PROMPTS[:2], greedy(8))
    assert made[1].error == "RuntimeError: that cannot be computed"
    assert made[1].token_ids == expected[1].token_ids[:5]
    assert made[0].token_ids == expected[0].token_ids


def test_what_needs_each_token_first_is_refused(make_engine, tiny_llama):
    with pytest.raises(InputError, match="--overlap-steps: --speculative guesses by a step's tokens"):
        make_engine(tiny_llama(), overlap_steps=True, speculation=Speculation(method="ngram"))
    assert make_engine(tiny_llama()).scheduler.depth == 1  # on a CPU nobody computes beside the host
