"""Pipeline schedules: order of passes, and bubble."""

import pytest

from llmb.perfmodel.pipeline_schedule import bubble, rank_order


@pytest.mark.parametrize(("pp", "vp", "ga"), [(8, None, 64), (8, 8, 64), (8, 5, 64), (4, 2, 8), (1, None, 3)])
def test_every_pass_runs_once_and_forward_first(pp: int, vp: int | None, ga: int) -> None:
    for rank in range(pp):
        order = rank_order(pp, vp, ga, rank)
        assert len(set(order)) == len(order) == 2 * ga * (vp or 1)
        position = {action: index for index, action in enumerate(order)}
        forwards = [action for action in order if action.forward]
        assert all(position[action] < position[action._replace(forward=False)] for action in forwards)


@pytest.mark.parametrize(("pp", "vp", "ga"), [(8, None, 64), (8, 8, 64), (8, 8, 128), (8, 5, 64), (2, 2, 2)])
def test_bubble_equals_the_closed_form(pp: int, vp: int | None, ga: int) -> None:
    assert bubble(pp, vp, ga) == pytest.approx((pp - 1) / ((vp or 1) * ga + pp - 1))
