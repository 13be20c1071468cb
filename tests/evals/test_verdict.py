import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.evals.verdict import Verdict, compare_scores, exact_mcnemar
from llmq.profiles.errors import InputError


def pairs(both, lost, won, neither):
    base = [1] * both + [1] * lost + [0] * won + [0] * neither
    cand = [1] * both + [0] * lost + [1] * won + [0] * neither
    return base, cand


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (10, 0, 2 / 1024), (8, 2, 0.109375), (6, 1, 0.125), (1, 9, 0.021484375)],
)
def test_exact_mcnemar_equals_published_binomial_tails(lost, won, p):
    assert exact_mcnemar(lost, won) == pytest.approx(p)


def test_many_discordant_items_do_not_underflow():
    assert 0 < exact_mcnemar(3000, 2000) < 1e-40
    assert exact_mcnemar(2500, 2500) == pytest.approx(1.0)


def test_counts_and_means():
    measured = compare_scores(*pairs(both=60, lost=12, won=8, neither=20))
    assert (measured.num_items, measured.lost, measured.won) == (100, 12, 8)
    assert (measured.baseline, measured.candidate) == (0.72, 0.68)
    assert measured.drop == pytest.approx(0.04)
    # The normal approximation: sqrt((0.2 - 0.0016) / 100) = 0.0445 on each side, times 1.96.
    assert measured.interval == pytest.approx((0.04 - 0.0873, 0.04 + 0.0873), abs=0.015)


def test_clear_cases():
    assert compare_scores(*pairs(900, 2, 3, 100)).verdict(0.01) is Verdict.PASS
    assert compare_scores(*pairs(500, 200, 10, 300)).verdict(0.01) is Verdict.FAIL
    assert [verdict.exit_code for verdict in Verdict] == [0, 1, 3]


def test_too_few_items_say_how_many_would_decide():
    few = compare_scores(*pairs(70, 5, 5, 20))
    assert few.verdict(0.01) is Verdict.NOT_ENOUGH
    needed = few.items_needed(0.01)
    assert needed > 1000
    factor = -(-needed // 100) + 2
    assert compare_scores(*pairs(70 * factor, 5 * factor, 5 * factor, 20 * factor)).verdict(0.01) is Verdict.PASS


def test_a_handful_of_items_without_a_difference_proves_nothing():
    few = compare_scores(*pairs(5, 0, 0, 5))
    assert few.verdict(0.01) is Verdict.NOT_ENOUGH
    assert few.one_sided[1] == pytest.approx(1 - 0.05 ** (1 / 10), abs=1e-6)  # Clopper-Pearson at zero of ten
    assert compare_scores(*pairs(200, 0, 0, 100)).verdict(0.01) is Verdict.PASS  # 1 - 0.05^(1/300) < 1 %


def test_scores_that_are_shares_have_no_mcnemar():
    measured = compare_scores([0.5, 0.75, 1.0], [0.5, 0.5, 1.0])
    assert (measured.lost, measured.won, measured.mcnemar_p) == (None, None, None)
    assert measured.drop == pytest.approx(0.25 / 3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(1, 40), st.randoms())
def test_neither_order_nor_role_changes_what_is_found(both, lost, won, neither, random):
    base, cand = pairs(both, lost, won, neither)
    one, other = compare_scores(base, cand), compare_scores(cand, base)
    assert one.drop == pytest.approx(-other.drop)
    assert one.mcnemar_p == pytest.approx(other.mcnemar_p)
    assert one.one_sided[0] <= one.drop + 1e-9
    assert one.drop - 1e-9 <= one.one_sided[1]
    order = list(range(len(base)))
    random.shuffle(order)
    shuffled = compare_scores([base[i] for i in order], [cand[i] for i in order])
    assert (shuffled.lost, shuffled.won, shuffled.drop) == (one.lost, one.won, pytest.approx(one.drop))


def test_a_margin_is_rarely_passed_by_a_model_that_is_worse_than_it():
    """Coverage: of candidates that truly lose 5 points, hardly more than 5 % pass at a margin of 5 points."""
    generator = np.random.default_rng(1)
    passed = 0
    for _ in range(200):
        outcome = generator.choice(4, size=400, p=[0.65, 0.08, 0.03, 0.24])
        base, cand = np.isin(outcome, (0, 1)).astype(float), np.isin(outcome, (0, 2)).astype(float)
        passed += compare_scores(base, cand).verdict(0.05) is Verdict.PASS
    assert passed <= 22  # 5 % of 200 and three standard deviations


def test_no_item_is_refused():
    with pytest.raises(InputError, match="no item"):
        compare_scores([], [])
