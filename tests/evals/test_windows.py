import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.evals.windows import Window, plan_windows
from llmq.profiles.errors import InputError


def test_windows_side_by_side_leave_the_first_token_of_each_unscored():
    plan = plan_windows(10, window=4)
    assert plan.windows == (Window(0, 1, 4), Window(4, 5, 8), Window(8, 9, 10))
    assert (plan.stride, plan.num_scored, plan.num_unscored) == (4, 7, 3)


def test_a_last_window_of_one_token_scores_nothing_and_is_left_out():
    plan = plan_windows(9, window=4)
    assert plan.windows == (Window(0, 1, 4), Window(4, 5, 8))
    assert plan.num_unscored == 3


@given(st.integers(2, 300), st.integers(2, 60), st.data())
def test_overlapping_windows_score_every_token_but_the_first_once_with_enough_context(num_tokens, window, data):
    stride = data.draw(st.integers(1, window - 1))
    plan = plan_windows(num_tokens, window, stride)
    scored = [token for w in plan.windows for token in range(w.first_scored, w.end)]
    assert scored == list(range(1, num_tokens))
    for w in plan.windows:
        assert w.end - w.begin <= window
        assert w.begin < w.first_scored
        assert w.begin == 0 or w.first_scored - w.begin >= window - stride


def test_a_prefix_counts_towards_the_window_and_is_never_scored():
    plan = plan_windows(8, window=5, prefix=(99,))
    assert [plan.prompt(i, list(range(8))) for i in range(2)] == [[99, 0, 1, 2, 3], [99, 4, 5, 6, 7]]
    assert [plan.prompt_start(i) for i in range(2)] == [2, 2]


def test_max_windows_covers_only_the_beginning():
    plan = plan_windows(100, window=10, max_windows=2)
    assert (len(plan.windows), plan.num_tokens, plan.num_scored) == (2, 20, 18)


@pytest.mark.parametrize(
    ("num_tokens", "window", "stride", "message"),
    [
        (10, 1, None, "a window of 1 tokens scores nothing"),
        (10, 4, 5, "stride 5 is outside 1..4"),
        (10, 4, 0, "stride 0 is outside 1..4"),
        (1, 4, 2, r"the text has 1 token\(s\)"),
    ],
)
def test_what_cannot_score_is_refused(num_tokens, window, stride, message):
    with pytest.raises(InputError, match=message):
        plan_windows(num_tokens, window, stride)
