import math
import re
from xml.etree import ElementTree

import pytest

from llmq.profiles.svg import HEIGHT, WIDTH, Axis, Series, plot


@pytest.mark.parametrize("highest", [0.003, 0.9, 1, 7, 42, 999, 123_456])
def test_linear_ticks_are_few_round_and_within(highest):
    ticks = Axis.over([highest]).ticks()
    assert 3 <= len(ticks) <= 8
    assert ticks[0] == 0
    assert highest / 2 <= ticks[-1] <= 1.05 * highest
    assert all(len(f"{tick:.10g}".replace(".", "").strip("0")) <= 2 for tick in ticks)


def test_a_logarithm_leaves_out_what_it_cannot_show():
    axis = Axis.over([0, -1, math.inf, 1, 1000], is_log=True)
    assert axis.place(1000) - axis.place(100) == pytest.approx(axis.place(100) - axis.place(10))
    assert axis.ticks() == pytest.approx([1, 10, 100, 1000])
    assert 0 < axis.place(1) < axis.place(1000) < 1
    assert axis.place(0) == 0


def test_points_are_drawn_where_they_are():
    drawn = plot([Series("", [(0, 0), (10, 5)])], title="t", x_label="x", y_label="y")
    (path,) = re.findall(r'polyline points="([^"]*)"', drawn)
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in path.split())
    assert x0 < x1 < WIDTH
    assert HEIGHT > y0 > y1 > 0


def test_steps_hold_until_the_next():
    drawn = plot([Series("", [(0, 1), (4, 3)], style="steps")], title="t", x_label="x", y_label="y")
    (path,) = re.findall(r'polyline points="([^"]*)"', drawn)
    places = [tuple(map(float, point.split(","))) for point in path.split()]
    assert places[1][1] == places[2][1]  # level
    assert places[2][0] == places[3][0]  # then up


def test_names_are_escaped_and_only_several_have_a_legend():
    one = Series("<a> & b", [(1, 1)], style="dots")
    assert "&lt;a&gt;" not in plot([one], title="t", x_label="<x>", y_label="y")
    both = plot([one, Series("c", [(2, 2)])], title="<t>", x_label="<x>", y_label="y", limits=[("SLO", 3)])
    assert "&lt;a&gt; &amp; b" in both
    assert "SLO" in both
    ElementTree.fromstring(both)


def test_nothing_is_no_plot():
    assert plot([Series("a", [])], title="t", x_label="x", y_label="y") == ""
    ElementTree.fromstring(plot([Series("a", [(0, 0)])], title="t", x_label="x", y_label="y", log_x=True))
