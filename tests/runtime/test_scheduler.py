"""The scheduler alone: budgets, order, ends. No model: a step's result is made up."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.admission import MIN_HISTORY, UNKNOWN, peak_blocks
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.policy import StepPolicy
from llmq.runtime.request import BeamParams, EngineRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import RequestResult, SchedulerOutput, StepResult

LAYOUT = KVCacheLayout((KVCacheGroup(KVCacheSpec(1, 8, 8, KV_DTYPES["bf16"]), (0,), 16),))
EOS = 2


def make(num_blocks=64, max_num_seqs=8, budget=64, max_model_len=256, caching=True) -> Scheduler:
    kv = KVCacheManager(LAYOUT, num_blocks, enable_prefix_caching=caching)
    policy = StepPolicy(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Scheduler(kv, policy, [EOS], max_model_len)


def add(scheduler, name, num_tokens, *, arrival=0.0, priority=0, first_token=3, **params):
    scheduler.add_request(
        EngineRequest(
            request_id=name,
            prompt_token_ids=[first_token] * num_tokens,
            sampling_params=SamplingParams(**{"max_tokens": 5, **params}),
            arrival_time_s=arrival,
            priority=priority,
        )
    )


def step(scheduler, token=9) -> tuple[SchedulerOutput, list]:
    plan = scheduler.schedule()
    results = {
        item.request_id: RequestResult(token_ids=[token] if item.samples else [], error=None) for item in plan.scheduled
    }
    return plan, scheduler.update_from_output(plan, StepResult(results=results))


def scheduled(plan) -> dict[str, int]:
    return {item.request_id: item.num_scheduled_tokens for item in plan.scheduled}


def test_a_running_request_decodes_while_a_long_prompt_is_chunked():
    scheduler = make(budget=64)
    add(scheduler, "short", 10)
    step(scheduler)
    add(scheduler, "long", 150, arrival=1.0, first_token=4)
    plans = [scheduled(step(scheduler)[0]) for _ in range(3)]
    assert plans == [{"short": 1, "long": 63}, {"short": 1, "long": 63}, {"short": 1, "long": 24}]


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [(70, [64, 64, 64, 8]), (64, [64, 64, 64, 8]), (120, [112, 88]), (40, [40] * 5), (200, [200]), (10, [10] * 20)],
)
def test_a_chunk_that_leaves_some_ends_on_a_block_border_where_that_gives_up_little(budget, chunks):
    scheduler = make(budget=budget)
    add(scheduler, "long", 200)
    assert [scheduled(step(scheduler)[0])["long"] for _ in chunks] == chunks


def test_a_prompt_that_goes_first_leaves_a_token_to_each_that_decodes():
    scheduler = make(budget=20, max_num_seqs=4)
    for number in range(3):
        add(scheduler, f"decoding {number}", 4, arrival=5.0 + number, max_tokens=20)
    step(scheduler)
    add(scheduler, "older", 60, arrival=1.0, first_token=4)  # it waited for its turn among tenants, say
    assert scheduled(step(scheduler)[0])["older"] == 16
    for chunk in (16, 16, 12):
        plan = scheduled(step(scheduler)[0])
        assert plan == {"older": chunk, "decoding 0": 1, "decoding 1": 1, "decoding 2": 1}
        assert next(iter(plan)) == "older"


def test_prompt_tokens_are_counted_apart_from_those_that_are_decoded():
    scheduler = make(budget=8)
    add(scheduler, "short", 1)  # a prompt of one token looks like a decode step
    add(scheduler, "long", 15, arrival=1.0, first_token=4)
    counts = [step(scheduler)[0].num_prompt_tokens for _ in range(4)]
    assert counts == [8, 7, 1, 0]


def test_the_budget_and_the_number_of_sequences_hold():
    scheduler = make(max_num_seqs=3, budget=20)
    for index in range(6):
        add(scheduler, str(index), 12, arrival=index, first_token=3 + index)
    while scheduler.has_requests:
        plan, _ = step(scheduler)
        assert plan.num_scheduled_tokens == sum(scheduled(plan).values()) <= 20
        assert len(plan.scheduled) <= 3


def test_priority_goes_before_arrival():
    scheduler = make(max_num_seqs=1)
    add(scheduler, "first", 4, arrival=0.0, priority=1)
    add(scheduler, "second", 4, arrival=1.0, priority=1)
    add(scheduler, "urgent", 4, arrival=2.0, priority=0)
    order = []
    while scheduler.has_requests:
        order += [output.request_id for output in step(scheduler)[1] if output.finish_reason]
    assert order == ["urgent", "first", "second"]


def test_who_comes_at_the_same_moment_is_served_in_the_order_of_coming():
    scheduler = make(max_num_seqs=1)
    for name in "abc":
        add(scheduler, name, 4)
    order = []
    while scheduler.has_requests:
        order += [output.request_id for output in step(scheduler)[1] if output.finish_reason]
    assert order == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("params", "token", "tokens", "reason"),
    [
        ({"max_tokens": 3}, 9, 3, "length"),
        ({"max_tokens": 9}, EOS, 1, "stop"),
        ({"max_tokens": 3, "ignore_eos": True}, EOS, 3, "length"),
        ({"max_tokens": 9, "stop_token_ids": frozenset({9})}, 9, 1, "stop"),
        ({"max_tokens": 9, "stop_token_ids": frozenset({9}), "min_tokens": 2}, 9, 3, "stop"),
        ({"max_tokens": 0, "prompt_logprobs": 0}, 9, 0, "length"),
        ({"max_tokens": 9999}, 9, 256 - 20, "length"),
    ],
)
def test_ends(params, token, tokens, reason):
    scheduler = make()
    add(scheduler, "r", 20, **params)
    outputs = []
    while scheduler.has_requests:
        outputs += step(scheduler, token)[1]
    assert sum(len(output.new_token_ids) for output in outputs) == tokens
    assert outputs[-1].finish_reason == reason
    assert outputs[-1].stop_token_id == (token if reason == "stop" else None)
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks


def test_abort_frees_at_once_wherever_the_request_is():
    scheduler = make(max_num_seqs=1)
    add(scheduler, "running", 40)
    add(scheduler, "waiting", 40, arrival=1.0)
    plan = scheduler.schedule()
    for name in ("running", "waiting"):
        assert scheduler.abort(name).finish_reason == "abort"
    assert scheduler.abort("running") is None
    assert scheduler.kv.pool.num_free_blocks == 64
    # The step that was under way comes back: nobody is left to receive it.
    results = {item.request_id: RequestResult(token_ids=[9]) for item in plan.scheduled}
    assert scheduler.update_from_output(plan, StepResult(results=results)) == []
    add(scheduler, "next", 4)
    assert step(scheduler)[0].forgotten_request_ids == ["running"]


def test_a_failed_request_ends_alone():
    scheduler = make()
    add(scheduler, "good", 4)
    add(scheduler, "bad", 4, arrival=1.0)
    plan = scheduler.schedule()
    results = {"good": RequestResult(token_ids=[9]), "bad": RequestResult(error="sampler: no such token")}
    outputs = {output.request_id: output for output in scheduler.update_from_output(plan, StepResult(results=results))}
    assert outputs["bad"].finish_reason == "error"
    assert outputs["good"].new_token_ids == [9]
    assert scheduled(step(scheduler)[0]) == {"good": 1}


def test_a_name_in_use_is_refused():
    scheduler = make()
    add(scheduler, "a", 4)
    with pytest.raises(ValueError, match="'a' is in use"):
        add(scheduler, "a", 4)


def finish_all(scheduler) -> list[str]:
    order = []
    while scheduler.has_requests:
        order += [output.request_id for output in step(scheduler)[1] if output.finish_reason]
    return order


def test_admission_looks_ahead_so_that_nothing_is_preempted():
    """8 blocks; each request will hold 4 at its end: two fit, and the third starts when one has ended."""
    scheduler = make(num_blocks=8, budget=256)
    for index in range(5):
        add(scheduler, str(index), 31, arrival=index, first_token=3 + index, max_tokens=20)
    step(scheduler)
    assert len(scheduler.running) == 2
    finish_all(scheduler)
    assert scheduler.num_preemptions == scheduler.preempted_tokens == 0
    assert scheduler.admission.num_deferrals > 0


def test_admission_learns_how_long_answers_are():
    """Everybody may write 200 tokens and writes 3: after a while more are admitted than would fit if they did."""
    scheduler = make(num_blocks=40, max_num_seqs=32, budget=512)
    most = []
    for wave in range(2):
        for index in range(30):
            add(scheduler, f"{wave}.{index}", 20, arrival=index, first_token=3 + index, max_tokens=200)
        running = 0
        while scheduler.has_requests:
            plan = scheduler.schedule()
            running = max(running, len(scheduler.running))
            done = {r.request_id for r in scheduler.running if r.num_output_tokens >= 2}
            tokens = {i.request_id: [EOS if i.request_id in done else 9] for i in plan.scheduled if i.samples}
            results = {i.request_id: RequestResult(token_ids=tokens.get(i.request_id, [])) for i in plan.scheduled}
            scheduler.update_from_output(plan, StepResult(results=results))
        most.append(running)
    assert most[0] < 16 < most[1]
    assert scheduler.num_preemptions == 0


def test_a_wrong_guess_is_mended_by_preemption():
    scheduler = make(num_blocks=12, budget=256)
    for length in [1] * 32:  # all that ended so far ended at once
        scheduler.admission.lengths.record(length)
    for index in range(6):
        add(scheduler, str(index), 20, arrival=index, first_token=3 + index, max_tokens=100)
    finish_all(scheduler)
    assert scheduler.num_preemptions > 0
    assert scheduler.preempted_tokens > 0
    assert scheduler.kv.pool.num_free_blocks == 12


def test_peak_blocks_is_the_largest_of_all_moments():
    group = LAYOUT.groups[0]
    rng = random.Random(0)
    for _ in range(50):
        state = [(rng.randint(1, 90), rng.randint(0, 60)) for _ in range(rng.randint(1, 9))]
        moments = []
        for tick in range(61):
            moments.append(sum(-(-(tokens + tick) // 16) for tokens, left in state if left >= tick))
        assert peak_blocks([group], [t for t, _ in state], [left for _, left in state]) == max(moments)


def test_static_batching_admits_nothing_while_something_runs():
    kv = KVCacheManager(LAYOUT, 64)
    policy = StepPolicy(max_num_seqs=2, max_num_batched_tokens=256, admit_while_running=False)
    scheduler = Scheduler(kv, policy, [EOS], 256)
    for index, max_tokens in enumerate([2, 6, 3, 3]):
        add(scheduler, str(index), 8, arrival=index, first_token=3 + index, max_tokens=max_tokens)
    batches = []
    while scheduler.has_requests:
        batches.append(sorted(scheduled(step(scheduler)[0])))
    assert batches == [["0", "1"]] * 2 + [["1"]] * 4 + [["2", "3"]] * 3


def test_a_prefix_that_is_being_computed_is_waited_for():
    """Four requests with one 160-token prefix arrive together: it is computed once, in chunks."""
    scheduler = make(budget=48, max_num_seqs=8)
    for index in range(4):
        scheduler.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=[*range(160), 200 + index, 201, 202],
                sampling_params=SamplingParams(max_tokens=3),
                arrival_time_s=index,
            )
        )
    computed = 0
    while scheduler.has_requests:
        plan, _ = step(scheduler)
        computed += plan.num_scheduled_tokens
    assert computed == 163 + 3 * 3 + 4 * 2  # the prefix once, each one's own end, two more tokens each


def test_who_waits_for_a_prefix_goes_on_when_its_owner_is_gone():
    scheduler = make(budget=48, max_num_seqs=8)
    add(scheduler, "first", 160)
    add(scheduler, "second", 160, arrival=1.0)
    assert scheduled(step(scheduler)[0]) == {"first": 48}
    scheduler.abort("first")
    assert scheduled(step(scheduler)[0]) == {"second": 48}
    assert finish_all(scheduler) == ["second"]
    assert not scheduler.kv._being_computed


def test_tenants_share_fairly_and_idleness_saves_nothing():
    scheduler = make(max_num_seqs=1, budget=64)

    def ask(name, tenant, arrival):
        scheduler.add_request(
            EngineRequest(
                request_id=name,
                prompt_token_ids=[hash(name) % 1000] * 10,
                sampling_params=SamplingParams(max_tokens=5),
                arrival_time_s=arrival,
                tenant=tenant,
            )
        )

    for index in range(8):
        ask(f"flood{index}", "a", index)
    done = [finished for _ in range(15) for finished in step(scheduler)[1] if finished.finish_reason]
    assert [output.request_id for output in done] == ["flood0", "flood1", "flood2"]
    for index in range(4):
        ask(f"late{index}", "b", 100 + index)
    order = finish_all(scheduler)
    assert order[:8] == ["late0", "flood3", "late1", "flood4", "late2", "flood5", "late3", "flood6"] or order[:8] == [
        "flood3", "late0", "flood4", "late1", "flood5", "late2", "flood6", "late3",
    ]  # fmt: skip


def ask(scheduler, name, tenant, arrival, token, num_tokens=10):
    scheduler.add_request(
        EngineRequest(
            request_id=name,
            prompt_token_ids=[token] * num_tokens,
            sampling_params=SamplingParams(max_tokens=5),
            arrival_time_s=arrival,
            tenant=tenant,
        )
    )


def test_a_tenant_alone_until_now_is_not_starved_by_one_that_comes():
    """What "a" was served while nobody else asked is no debt, also where none of its requests waits at the moment."""
    scheduler = make(max_num_seqs=1, budget=64)
    for index in range(8):
        ask(scheduler, f"alone{index}", "a", index, index)
    finish_all(scheduler)
    for index in range(4):
        ask(scheduler, f"b{index}", "b", 100 + index, 20 + index)
        ask(scheduler, f"a{index}", "a", 100.5 + index, 30 + index)
    order = finish_all(scheduler)
    assert [name[0] for name in order[:4]] in (list("abab"), list("baba"), list("abba"), list("baab"))


def test_tenants_share_the_places_of_one_step():
    scheduler = make(max_num_seqs=4, budget=64)
    for tenant in "ab":
        for index in range(4):
            ask(scheduler, f"{tenant}{index}", tenant, ord(tenant) + index / 10, 10 * ord(tenant) + index, num_tokens=3)
    assert sorted(scheduled(step(scheduler)[0])) == ["a0", "a1", "b0", "b1"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2), st.integers(0, 12)),
        min_size=1,
        max_size=14,
    ),
    st.integers(6, 20),
    st.sampled_from([8, 17, 64]),
    st.booleans(),
)
def test_every_request_ends_with_all_its_tokens(requests, num_blocks, budget, caching):
    """Any arrival order, priorities, a pool that is barely enough: nobody starves, nothing leaks, the runner's view
    (block tables rebuilt from the differences in each plan) equals the manager's."""
    scheduler = make(num_blocks=num_blocks, budget=budget, max_model_len=96, caching=caching)
    waiting = sorted(enumerate(requests), key=lambda item: item[1][3])
    made = {str(index): 0 for index, _ in waiting}
    tables: dict[str, list[int]] = {}
    for tick in range(10_000):
        while waiting and waiting[0][1][3] <= tick:
            index, (length, max_tokens, priority, arrival) = waiting.pop(0)
            add(scheduler, str(index), length, arrival=arrival, priority=priority, max_tokens=max_tokens)
        if not scheduler.has_requests and not waiting:
            break
        plan = scheduler.schedule()
        for name in plan.forgotten_request_ids:
            tables.pop(name)
        for new in plan.new_requests:
            assert new.request_id not in tables
            tables[new.request_id] = []
        for item in plan.scheduled:
            for first, ids in zip(item.first_block, item.block_ids, strict=True):
                tables[item.request_id][first:] = ids
            assert tables[item.request_id] == scheduler.kv.block_ids(item.request_id)[0]
            assert len(tables[item.request_id]) * 16 >= item.num_computed_tokens + item.num_scheduled_tokens
        assert plan.num_scheduled_tokens <= budget
        results = {i.request_id: RequestResult(token_ids=[9] if i.samples else []) for i in plan.scheduled}
        for output in scheduler.update_from_output(plan, StepResult(results=results)):
            made[output.request_id] += len(output.new_token_ids)
        scheduler.kv.check_integrity()
    assert made == {str(i): min(m, 96 - length) for i, (length, m, _, _) in enumerate(requests)}
    assert scheduler.kv.pool.num_free_blocks == num_blocks


def test_admission_learns_from_answers_that_their_readers_cut():
    scheduler = make()
    lengths = scheduler.admission.lengths
    for number in range(MIN_HISTORY):
        add(scheduler, str(number), 4, max_tokens=100)
    for _ in range(3):
        step(scheduler)
    for number in range(MIN_HISTORY):
        scheduler.abort(str(number))  # as a stop string ends one
    assert lengths.expected_remaining(np.array([0, 1, 2])).tolist() == [UNKNOWN] * 3  # half of them never ran
    for _ in range(MIN_HISTORY):
        lengths.record(8)
    assert lengths.expected_remaining(np.array([0, 2, 8])).tolist() == [8, 6, UNKNOWN]


@pytest.mark.parametrize(
    "sequences", [{"forks": [("a", 1), ("b", 2), ("c", 3)]}, {"beams": BeamParams(width=4)}], ids=["forks", "beams"]
)
def test_sequences_to_come_are_counted_before_they_are_there(sequences):
    """12 blocks. A parent and three more will hold 4 × 3; beside a request of 3 that runs they would not fit."""
    scheduler = make(num_blocks=12, budget=256)
    add(scheduler, "first", 20, max_tokens=20)
    scheduler.add_request(
        EngineRequest(
            request_id="parent",
            prompt_token_ids=[5] * 20,
            sampling_params=SamplingParams(max_tokens=20),
            arrival_time_s=1.0,
            **sequences,
        )
    )
    assert scheduled(step(scheduler)[0]) == {"first": 20}
    scheduler.abort("first")
    assert scheduled(scheduler.schedule()) == {"parent": 20}
