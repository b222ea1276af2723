"""Pareto set against brute force, and its knee."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.perfmodel.tune.pareto import knee, pareto_set

POINTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30)


def dominated(point, others):
    return any(o != point and o[0] >= point[0] and o[1] >= point[1] for o in others)


@given(POINTS)
def test_the_set_is_that_of_brute_force(points):
    front = pareto_set(points)
    assert {points[i] for i in front} == {p for p in points if not dominated(p, points)}
    assert len({points[i] for i in front}) == len(front)
    assert all(points.index(points[i]) == i for i in front)  # of equal points the first
    assert [points[i][0] for i in front] == sorted((points[i][0] for i in front), reverse=True)


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), max_size=12))
def test_the_knee_is_farthest_from_the_line_between_the_ends(points):
    found_at = knee(points)
    front = pareto_set(points)
    if found_at is None:
        return
    assert found_at in front[1:-1]
    (x0, y0), (x1, y1) = points[front[0]], points[front[-1]]

    def distance(i):
        return math.log(points[i][0] / x1) / math.log(x0 / x1) + math.log(points[i][1] / y0) / math.log(y1 / y0)

    assert distance(found_at) == max(distance(i) for i in front)
    assert distance(found_at) > 1


def test_knees():
    assert knee([(50, 100), (40, 350), (20, 400)]) == 1
    assert knee([(50, 100), (10, 500), (5, 1000)]) is None  # a straight line of logarithms
    assert knee([(50, 100), (20, 0.0), (0.0, 400)]) is None
    ladder = [(366, 366), (317, 537), (222, 1776), (144, 9178), (62, 15705), (21, 18531)]
    assert knee(ladder) == 3  # hollow on linear axes
    assert knee([(50, 100), (20, 400)]) is None
    assert knee([]) is None


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_points_without_a_finite_figure_are_left_out(broken):
    assert pareto_set([(broken, 1.0), (1.0, 2.0)]) == [1]
