"""An engine that keeps an SLO: what it measures first, what it times, and that its tokens are those of any engine."""

import random
from concurrent.futures import Future

import pytest
from engine_driver import greedy, run_all
from paced_scheduler import COST, LAYOUT, MOST, Served

from llmq.profiles.errors import InputError
from llmq.profiles.slo import Slo
from llmq.profiles.step_cost import StepShape
from llmq.runtime.memory import KVCachePlan
from llmq.runtime.pacer import Pacer
from llmq.runtime.policy import step_shape
from llmq.runtime.request import EngineRequest
from llmq.runtime.scheduler_output import RequestResult, SchedulerOutput, StepResult
from llmq.runtime.trial_steps import check_promise, run_trial

PROMPT = [7] * 40


class KnownCost:
    """An executor whose steps take COST's time on a clock of its own; the first takes ten times as long."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.plans: list[SchedulerOutput] = []

    def submit(self, plan: SchedulerOutput) -> "Future[StepResult]":
        if plan.scheduled:
            self.now_s += COST.step_s(step_shape(plan)) * (1 if self.plans else 10)
        self.plans.append(plan)
        future: Future[StepResult] = Future()
        future.set_result(StepResult(results={one.request_id: RequestResult(token_ids=[9]) for one in plan.scheduled}))
        return future


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(1024, 4096), (16, 64), (5, 4096), (2, 20)])
def test_a_trial_finds_the_cost_of_a_step_and_leaves_nothing(num_blocks, max_model_len):
    executor = KnownCost()
    plan = KVCachePlan(LAYOUT, num_blocks, max_model_len)
    trial = run_trial(executor, plan, 512, MOST, lambda: executor.now_s)
    assert trial.floor_s == pytest.approx(COST.step_s(StepShape.decode(1, 10)), rel=0.05)
    added = {new.request_id for one in executor.plans for new in one.new_requests}
    assert {name for one in executor.plans for name in one.forgotten_request_ids} == added
    if num_blocks == 1024 and max_model_len == 4096:
        for shape in (StepShape.decode(6, 300), StepShape.decode(3, 200) + StepShape.chunk(100, 150)):
            assert trial.cost.step_s(shape) == pytest.approx(COST.step_s(shape), rel=0.05)


def test_requests_too_short_to_time_are_refused():
    with pytest.raises(InputError, match="at most 8 tokens are too short"):
        run_trial(KnownCost(), KVCachePlan(LAYOUT, 64, 8), 512, MOST)


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("tpot=12ms", r"--slo tpot=12ms: a token takes 20ms .* one request alone .* Promise tpot=30ms or more"),
        ("ttft=2ms,tpot=1s", r"--slo ttft=2ms: the first token of the shortest prompt takes 20ms .*ttft=30ms"),
    ],
)
def test_less_than_a_token_takes_cannot_be_promised(slo, message):
    with pytest.raises(InputError, match=message):
        check_promise(Slo.parse(slo), 0.020)
    check_promise(Slo.parse("ttft=20ms,tpot=20ms"), 0.020)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_step_lasts_from_the_end_of_the_one_before_it_and_not_through_idle_time():
    clock, served = Clock(), Served("tpot=1s")
    times_s = []
    served.policy.model.observe = lambda shape, seconds: times_s.append(seconds)
    pacer = Pacer(served.policy.model, MOST, clock, slo=served.policy)
    served.add("a", 8)
    plan = served.scheduler.schedule()
    clock.now_s = 100.0  # idle until now
    for goes_on in (True, True, False):
        pacer.begin_step(served.scheduler)
        clock.now_s += 2.0
        pacer.end_step(plan, goes_on=goes_on)
        clock.now_s += 0.5  # the outputs are sent
    clock.now_s += 50.0
    pacer.begin_step(served.scheduler)
    clock.now_s += 3.0
    pacer.end_step(plan, goes_on=True)
    pacer.rest()
    clock.now_s += 60.0
    pacer.begin_step(served.scheduler)
    clock.now_s += 4.0
    pacer.end_step(plan, goes_on=True)
    assert times_s == [2.0, 2.5, 2.5, 3.0, 4.0]


def test_who_is_shed_is_told_why_with_all_its_samples():
    clock, served = Clock(), Served("ttft=500ms,tpot=60ms")
    pacer = Pacer(served.policy.model, MOST, clock, slo=served.policy)
    for number in range(30):
        served.add(f"{number:02d}", 60, arrival=number * 1e-6, n=1 + number % 2)
    outputs = pacer.begin_step(served.scheduler)
    assert {output.finish_reason for output in outputs} == {"shed"}
    names = [output.request_id for output in outputs]
    assert {"29", "29+1"} <= set(names)
    assert len(set(names)) == len(names)
    assert "promises 0.5 s: too many requests are before it" in outputs[-1].error
    assert all(output.retry_after_s > 0 for output in outputs)
    assert not any(served.scheduler.abort(name) for name in names)
    served.add("long", 3000, arrival=1.0)
    for request in list(served.scheduler.waiting):
        if request.request_id != "long":
            served.scheduler.abort(request.request_id)
    clock.now_s = 1.0
    assert "its 3000 prompt tokens take" in pacer.begin_step(served.scheduler)[0].error


def test_the_tokens_under_an_slo_are_those_without(tiny_llama, make_engine):
    draw = random.Random(2)
    prompts = [[draw.randrange(3, 512) for _ in range(draw.randint(1, 90))] for _ in range(12)]
    expected = [one.token_ids for one in run_all(make_engine(tiny_llama()), prompts, greedy(20))]
    engine = make_engine(tiny_llama(), slo=Slo.parse("tpot=10s"))
    before = engine.stats()
    assert (before.num_steps, before.prompt_tokens, before.prefix_cache_queries) == (0, 0, 0)
    assert before.num_free_blocks == before.num_blocks
    assert engine.info.pace.floor_s > 0
    assert engine.info.pace.most_decodes == 64
    assert [one.token_ids for one in run_all(engine, prompts, greedy(20))] == expected
    tight = make_engine(tiny_llama(), slo=Slo.parse("tpot=10s"))
    cost = tight.pacer.slo.model.cost
    slow = cost.scaled(10.0 / cost.step_s(StepShape.decode(4, 60)))  # four decodes of 60 tokens take all of the promise
    tight.pacer.slo.model.observe = lambda shape, seconds: None
    tight.pacer.slo.model._cost = slow
    assert [one.token_ids for one in run_all(tight, prompts, greedy(20))] == expected
    assert tight.stats().num_steps > 1.5 * engine.stats().num_steps


def test_an_engine_sheds_who_waited_too_long_and_serves_the_others(tiny_llama, make_engine):
    engine = make_engine(tiny_llama(), slo=Slo.parse("ttft=10s"))
    now_s = engine.pacer._clock()
    for name, arrival_s in (("late", now_s - 60), ("in time", now_s)):
        engine.add_request(
            EngineRequest(request_id=name, prompt_token_ids=PROMPT, sampling_params=greedy(2), arrival_time_s=arrival_s)
        )
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert [(one.request_id, one.finish_reason) for one in outputs] == [
        ("late", "shed"), ("in time", None), ("in time", "length"),
    ]  # fmt: skip
    engine.add_request(
        EngineRequest(request_id="late", prompt_token_ids=PROMPT, sampling_params=greedy(2), arrival_time_s=now_s - 60)
    )
    assert [one.finish_reason for one in engine.step()] == ["shed"]  # and no step without anybody in it
    assert not engine.has_unfinished_requests


def test_a_promise_that_the_machine_cannot_keep_is_no_start(tiny_llama, make_engine):
    with pytest.raises(InputError, match="on this machine with one request alone"):
        make_engine(tiny_llama(), slo=Slo.parse("ttft=1s,tpot=0.001ms"))
