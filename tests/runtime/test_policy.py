"""The numbers of a step under an SLO, held against the time that a known cost gives the steps made of them."""

import numpy as np
import pytest
from paced_scheduler import COST, MOST, Served

from llmq.profiles.step_cost import UNKNOWN_SPREAD, StepShape
from llmq.runtime.policy import LEAST_CHUNK, peak_step_s, step_shape


def test_the_shape_of_a_plan_is_the_sum_of_its_chunks():
    served = Served("tpot=1s")
    served.add("a", 40)
    served.step()
    served.add("b", 30, arrival=1.0)
    plan, _ = served.step()
    assert step_shape(plan) == StepShape.chunk(1, 40) + StepShape.chunk(30)


def test_without_anybody_decoding_a_step_is_as_large_as_it_may_be():
    served = Served("tpot=40ms")
    served.add("long", 600)
    plans = [served.step()[0].num_scheduled_tokens for _ in range(3)]
    assert plans == [256, 256, 88]


def test_a_prompt_beside_decodes_gets_what_their_tpot_leaves_and_not_a_block_less():
    served = Served("tpot=100ms")
    for number in range(4):
        served.add(f"decoding {number}", 10 + number, max_tokens=200)
    served.step()
    served.add("long", 1500, arrival=1.0)
    limit_s = 0.1 / UNKNOWN_SPREAD
    assert served.policy.step_limit_s == pytest.approx(limit_s)
    for _ in range(5):  # later chunks see more, and are smaller
        plan, seconds = served.step()
        *decodes, chunk = plan.scheduled
        assert [one.num_scheduled_tokens for one in decodes] == [1] * 4
        assert seconds <= limit_s
        # A chunk ends on a block border: the next one is a block further.
        longer = StepShape.chunk(chunk.num_scheduled_tokens + 16, chunk.num_computed_tokens)
        shorter = StepShape.chunk(chunk.num_scheduled_tokens, chunk.num_computed_tokens)
        assert seconds + COST.step_s(longer) - COST.step_s(shorter) > limit_s


def test_what_is_left_over_goes_to_the_next_prompts():
    served = Served("tpot=100ms")
    served.add("decoding", 10)
    served.step()
    for number in range(8):
        served.add(f"short {number}", 11, arrival=1.0 + number)
    plan, seconds = served.step()
    assert len(plan.scheduled) > 4
    assert 0.07 < seconds <= 0.1 / UNKNOWN_SPREAD


def test_a_prompt_never_stands_still_however_late_the_decodes_are():
    served = Served("tpot=200ms")
    for number in range(20):
        served.add(f"{number}", 10, max_tokens=100)
    served.step()
    served.add("long", 300, arrival=1.0)
    served.step()
    served.slow_down(3.0)
    assert served.step()[0].scheduled[-1].num_scheduled_tokens == LEAST_CHUNK


def test_as_many_are_admitted_as_keep_the_promise_until_their_end():
    served = Served("tpot=80ms")
    for number in range(32):
        served.add(f"{number}", 40, max_tokens=120, arrival=float(number))
    most_running, times = 0, []
    while served.scheduler.has_requests:
        had_decodes = any(one.num_output_tokens for one in served.scheduler.running)
        _, seconds = served.step()
        most_running = max(most_running, len(served.scheduler.running))
        times.append(seconds if had_decodes else 0.0)
    assert max(times) <= 0.08 / UNKNOWN_SPREAD
    # One more would not have done: their last steps together, beside the smallest chunk.
    reserve_s = COST.step_s(StepShape.chunk(8) + StepShape.chunk(8)) - COST.fixed_s
    assert COST.step_s(StepShape.decode(most_running + 1, 160)) + reserve_s > 0.08 / UNKNOWN_SPREAD
    assert most_running > 5


def test_samples_that_are_still_to_come_count_as_sequences():
    served = Served("tpot=80ms")
    served.add("alone", 40, max_tokens=120)
    served.step()
    served.add("four", 40, max_tokens=120, n=4, arrival=1.0)
    for number in range(20):
        served.add(f"{number}", 40, max_tokens=120, arrival=2.0 + number)
    times = [served.step()[1] for _ in range(60)]
    assert max(times) <= 0.08 / UNKNOWN_SPREAD
    assert len(served.scheduler.running) > 4


def test_one_runs_however_tight_the_promise_is():
    served = Served("tpot=1ms")
    for number in range(3):
        served.add(f"{number}", 10, max_tokens=3, arrival=float(number))
    while served.scheduler.has_requests:
        plan, _ = served.step()
        assert len(plan.scheduled) == 1


def test_without_a_promise_of_tpot_the_numbers_stay_as_they_are():
    served = Served("ttft=1s")
    served.add("a", 600)
    assert served.policy.next_step(served.scheduler) == MOST
    idle = Served("tpot=50ms")
    assert idle.policy.next_step(idle.scheduler) == MOST


def test_a_slower_machine_gets_smaller_steps():
    chunks = []
    for factor in (1.0, 2.0):
        served = Served("tpot=150ms")
        served.add("decoding", 10)
        served.slow_down(factor)
        served.step()
        served.add("long", 1000, arrival=1.0)
        chunks.append(served.step()[0].scheduled[-1].num_scheduled_tokens)
    assert LEAST_CHUNK < chunks[1] < 0.6 * chunks[0]


def test_the_peak_of_decodes_is_that_of_running_them_to_their_ends():
    draw = np.random.default_rng(3)
    for _ in range(20):
        tokens, remaining = draw.integers(1, 500, 12), draw.integers(0, 300, 12)
        steps_s = []
        for number in range(301):
            alive = remaining >= number
            count, context = int(alive.sum()), int(((tokens + number) * alive).sum())
            steps_s.append(COST.step_s(StepShape(count, count, context, context)))
        assert peak_step_s(COST, tokens, remaining) == pytest.approx(max(steps_s))
