"""The time of a step: fitted to synthetic steps whose cost is known, and followed when it changes."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from llmq.profiles.step_cost import NOTHING, ROW_KNOTS, UNKNOWN_SPREAD, StepCost, StepCostModel, StepShape

TRUE = StepCost(fixed_s=0.020, token_s=0.0008, sequence_s=0.002, context_token_s=3e-6, pair_s=4e-8)


def mixed_shapes(count: int, seed: int = 0) -> list[StepShape]:
    """Decodes of different batches and contexts, half of them beside a chunk of a prompt."""
    draw = np.random.default_rng(seed)
    shapes = []
    for number in range(count):
        shape = StepShape.decode(int(draw.integers(1, 24)), int(draw.integers(20, 2000)))
        if number % 2:
            shape += StepShape.chunk(int(draw.integers(16, 256)), int(draw.integers(0, 3000)))
        shapes.append(shape)
    return shapes


def noisy(shapes, cost=TRUE, sigma=0.05, seed=1) -> list[float]:
    noise = np.random.default_rng(seed).lognormal(-(sigma**2) / 2, sigma, len(shapes))
    return [cost.step_s(shape) * factor for shape, factor in zip(shapes, noise, strict=True)]


def observe_all(model: StepCostModel, shapes, times_s) -> StepCostModel:
    for shape, seconds in zip(shapes, times_s, strict=True):
        model.observe(shape, seconds)
    return model


def worst_error(cost: StepCost, shapes, truth=TRUE) -> float:
    return max(abs(cost.step_s(shape) / truth.step_s(shape) - 1) for shape in shapes)


def test_the_shape_of_a_chunk_counts_what_its_queries_see():
    seen = [7 + query + 1 for query in range(5)]  # the query itself among them
    assert StepShape.chunk(5, 7) == StepShape(5, 1, 12, sum(seen))
    assert StepShape.chunk(1, 9) == StepShape.decode(1, 10)
    assert StepShape.decode(3, 10) == sum((StepShape.chunk(1, 9) for _ in range(3)), NOTHING)


def test_a_fit_without_noise_is_exact():
    shapes = mixed_shapes(60)
    found = StepCost.fitted(shapes, [TRUE.step_s(shape) for shape in shapes])
    assert found.terms == pytest.approx(TRUE.terms, rel=1e-6)


def test_a_fit_is_not_drawn_away_by_steps_that_were_interrupted():
    shapes = mixed_shapes(200)
    times_s = noisy(shapes)
    times_s[::10] = [6 * seconds for seconds in times_s[::10]]
    assert worst_error(StepCost.fitted(shapes, times_s), mixed_shapes(100, seed=5)) < 0.08
    plain = np.linalg.lstsq([(1, *astuple(one)) for one in shapes], times_s, rcond=None)[0]
    assert worst_error(StepCost(*plain), mixed_shapes(100, seed=5)) > 0.2


def test_no_term_is_below_zero():
    shapes = mixed_shapes(40)
    found = StepCost.fitted(shapes, noisy(shapes, replace(TRUE, sequence_s=0.0, pair_s=0.0), sigma=0.3))
    assert min(found.terms) >= 0
    with pytest.raises(ValueError, match="no measured step"):
        StepCost.fitted([], [])


STAIRS = replace(TRUE, row_s=tuple(TRUE.token_s * (index % 3) for index in range(len(ROW_KNOTS) - 1)))


@pytest.mark.parametrize("beside", [0, 3, 40, 100])
@pytest.mark.parametrize("num_computed", [0, 1, 500, 4000])
@pytest.mark.parametrize("cost", [TRUE, STAIRS, replace(TRUE, pair_s=0.0), replace(TRUE, token_s=0.0)])
def test_tokens_within_a_time_are_the_most_that_fit(cost, num_computed, beside):
    for seconds in (0.0, 0.001, 0.015, 0.1, 1.0):
        tokens = cost.tokens_within(seconds, num_computed, beside)
        beyond_s = [cost.more_s(StepShape.chunk(n, num_computed), beside) for n in (tokens, tokens + 1)]
        assert beyond_s[1] > seconds
        assert tokens == 0 or beyond_s[0] <= seconds


def test_the_model_learns_the_terms_from_mixed_steps():
    shapes = mixed_shapes(300)
    wrong = StepCost(0.005, 0.002, 0.0, 1e-6, 0.0)
    model = observe_all(StepCostModel(wrong), shapes, noisy(shapes))
    assert worst_error(StepCostModel(wrong).cost, mixed_shapes(50, seed=9)) > 0.5
    assert worst_error(model.cost, mixed_shapes(50, seed=9)) < 0.1


def test_what_equal_steps_do_not_tell_apart_stays_as_it_was():
    # Hours of one decoding user must not forget what a prompt costs.
    shapes = [StepShape.decode(1, 400)] * 2000
    model = observe_all(StepCostModel(TRUE), shapes, noisy(shapes))
    assert worst_error(model.cost, mixed_shapes(50)) < 0.05
    assert model.cost.terms == pytest.approx(TRUE.terms, rel=0.15)


def test_a_machine_that_slows_down_is_noticed_in_a_few_steps_for_all_shapes():
    model = observe_all(StepCostModel(TRUE), mixed_shapes(256), noisy(mixed_shapes(256)))
    slow, decode = TRUE.scaled(1.8), [StepShape.decode(4, 300)] * 24
    observe_all(model, decode, noisy(decode, slow))
    assert worst_error(model.cost, mixed_shapes(50), slow) < 0.12


def test_the_spread_is_that_of_means_over_a_few_steps():
    shapes = mixed_shapes(600)
    model = StepCostModel(TRUE)
    assert model.spread(99) == UNKNOWN_SPREAD
    observe_all(model, shapes, noisy(shapes, sigma=0.2))
    # Eight steps of sigma 0.2 have a mean of sigma 0.07 and more, for they are not all as long: p99 lies at 2.3 of it.
    assert 1.10 < model.spread(99) < 1.35
    assert 1.0 <= model.spread(50) < model.spread(90) < model.spread(99)
    steady = observe_all(StepCostModel(TRUE), shapes, [TRUE.step_s(shape) for shape in shapes])
    assert steady.spread(99) == pytest.approx(1.0, abs=1e-6)


def test_no_time_is_no_observation():
    model = StepCostModel(TRUE)
    model.observe(StepShape.decode(1, 10), 0.0)
    assert model.cost == TRUE


def flat_then_steep(num_tokens: int) -> float:
    """A kernel whose tile is four rows: as Qwen2.5-1.5B on two threads, 103 ms and then 9 ms a row."""
    return 0.103 + 0.009 * max(0, num_tokens - 4)


# A prompt in chunks is in every trial: it tells what a token costs from what a sequence does.
CHUNKS = [
    StepShape.decode(1, 20) + StepShape.chunk(n, computed)
    for n, computed in ((16, 0), (32, 16), (64, 48), (128, 112), (128, 240))
]


def decodes(rows, count: int = 3) -> list[StepShape]:
    """Of one sequence with a long context and others with a short one, as in the engine's trial."""
    return [StepShape.decode(1, 370) + StepShape.decode(n - 1, 15) for n in rows for _ in range(count)]


def prices(cost: StepCost, batch: int) -> list[float]:
    return np.diff(cost.rows_more_s(batch, 100, 4)).tolist()


def test_the_price_of_a_row_is_that_of_the_tile_and_not_of_the_line():
    shapes = decodes((1, 2, 3, 4, 5, 6, 8, 12, 16)) + CHUNKS
    found = StepCost.fitted(shapes, [flat_then_steep(one.num_tokens) for one in shapes])
    for batch in (1, 2, 3, 4, 8):
        true = np.diff([flat_then_steep(batch + n) for n in range(5)])
        assert prices(found, batch) == pytest.approx(true.tolist(), abs=0.0015)
    assert prices(replace(found, row_s=()), 1)[0] > 0.008  # one price for all tokens


def test_a_table_outlasts_hours_of_one_batch():
    shapes = decodes((1, 2, 3, 4, 5, 6, 8)) + CHUNKS
    trial = StepCost.fitted(shapes, [flat_then_steep(one.num_tokens) for one in shapes])
    same = decodes([4], 1000)
    model = observe_all(StepCostModel(trial), same, noisy(same, StepCost(0.103, 0.0, 0.0, 0.0, 0.0)))
    assert prices(model.cost, 4)[:2] == pytest.approx([0.009, 0.009], abs=0.002)
    assert prices(model.cost, 1)[:2] == pytest.approx([0.0, 0.0], abs=0.002)


@pytest.mark.parametrize("seed", range(5))
def test_no_row_makes_a_step_shorter(seed):
    shapes = decodes((1, 2, 3, 4, 5, 6, 8, 12, 16)) + CHUNKS
    found = StepCost.fitted(shapes, noisy(shapes, replace(TRUE, token_s=0.0, sequence_s=0.0), sigma=0.3, seed=seed))
    assert (np.diff([found.step_s(StepShape.decode(n, 0)) for n in range(1, 70)]) >= -1e-9).all()
