"""Pipeline schedules: order of passes, bubble and activations in flight."""

import pytest

from llmb.perfmodel.pipeline_schedule import bubble, max_in_flight, rank_order


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


def test_first_rank_holds_one_micro_batch_per_stage() -> None:
    assert [max_in_flight(8, None, 64, rank) for rank in (0, 7)] == [8, 1]
    assert [max_in_flight(8, 8, 64, rank) for rank in (0, 7)] == [71, 57]
