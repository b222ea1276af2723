"""The order of a pipeline's passes is torch's, and its bubble the known one."""

import pytest

from llmb.perfmodel.pipeline_schedule import bubble, most_in_flight, rank_order


@pytest.mark.parametrize(("pp", "vp", "ga"), [(8, None, 64), (8, 8, 64), (8, 5, 64), (4, 2, 8), (1, None, 3)])
def test_every_pass_is_made_once_and_forward_first(pp: int, vp: int | None, ga: int) -> None:
    for rank in range(pp):
        order = rank_order(pp, vp, ga, rank)
        assert len(set(order)) == len(order) == 2 * ga * (vp or 1)
        at = {one: place for place, one in enumerate(order)}
        assert all(at[one] < at[one._replace(forward=False)] for one in order if one.forward)


@pytest.mark.parametrize(("pp", "vp", "ga"), [(8, None, 64), (8, 8, 64), (8, 8, 128), (8, 5, 64), (2, 2, 2)])
def test_the_bubble_is_the_known_formula(pp: int, vp: int | None, ga: int) -> None:
    assert bubble(pp, vp, ga) == pytest.approx((pp - 1) / ((vp or 1) * ga + pp - 1))


def test_the_first_rank_holds_a_micro_batch_for_each_stage() -> None:
    assert [most_in_flight(8, None, 64, rank) for rank in (0, 7)] == [8, 1]
    assert [most_in_flight(8, 8, 64, rank) for rank in (0, 7)] == [71, 57]
