import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.quantize.bit_allocation import Choice, Unit, allocate, lower_hull, smallest_under

choices = st.lists(
    st.builds(Choice, st.just(""), st.integers(1, 60), st.integers(0, 1000).map(lambda n: n / 100)),
    min_size=1,
    max_size=4,
)
units_of = st.lists(choices.map(lambda c: Unit("u", tuple(c))), min_size=1, max_size=4)


def every_allocation(units):
    for combination in itertools.product(*(unit.choices for unit in units)):
        yield sum(c.num_bytes for c in combination), sum(c.damage for c in combination)


@given(units_of, st.integers(0, 240))
def test_allocation_fits_and_is_within_one_upgrade_of_the_optimum(units, max_bytes):
    feasible = [damage for num_bytes, damage in every_allocation(units) if num_bytes <= max_bytes]
    found = allocate(units, max_bytes)
    if not feasible:
        assert found is None
        return
    assert found.num_bytes <= max_bytes
    assert all(choice in unit.choices for choice, unit in zip(found.choices, units, strict=True))
    optimum = min(feasible)
    assert found.lower_bound <= optimum + 1e-9
    # The greedy's known gap: it loses at most what one unit has between two neighbours of its hull.
    largest_step = max(
        (a.damage - b.damage for u in units for a, b in itertools.pairwise(lower_hull(u.choices))), default=0
    )
    assert optimum - 1e-9 <= found.damage <= optimum + largest_step + 1e-9


@given(units_of, st.integers(0, 4000).map(lambda n: n / 100))
def test_smallest_under_keeps_the_damage_and_is_near_the_fewest_bytes(units, max_damage):
    feasible = [num_bytes for num_bytes, damage in every_allocation(units) if damage <= max_damage]
    found = smallest_under(units, max_damage)
    if not feasible:
        assert found is None
        return
    assert found.damage <= max_damage + 1e-9
    largest_step = max(
        (b.num_bytes - a.num_bytes for u in units for a, b in itertools.pairwise(lower_hull(u.choices))), default=0
    )
    assert min(feasible) <= found.num_bytes <= min(feasible) + largest_step


def test_bits_go_where_they_save_most():
    sensitive = Unit("down", (Choice("3", 30, 9.0), Choice("4", 40, 2.0), Choice("8", 80, 0.1)))
    robust = Unit("up", (Choice("3", 30, 0.3), Choice("4", 40, 0.1), Choice("8", 80, 0.0)))
    labels = [choice.label for choice in allocate([sensitive, robust], 112).choices]
    assert labels == ["8", "3"]
    assert [choice.label for choice in allocate([sensitive, robust], 80).choices] == ["4", "4"]


@given(choices)
def test_hull_is_convex_and_keeps_both_ends(some):
    hull = lower_hull(some)
    assert hull[0].num_bytes == min(c.num_bytes for c in some)
    assert hull[-1].damage == min(c.damage for c in some)
    slopes = [(a.damage - b.damage) / (b.num_bytes - a.num_bytes) for a, b in itertools.pairwise(hull)]
    assert slopes == sorted(slopes, reverse=True)


def test_a_unit_without_choices_is_refused():
    with pytest.raises(ValueError, match="down"):
        Unit("down", ())
