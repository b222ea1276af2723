"""Pipeline schedules: order of passes, and bubble."""

from dataclasses import replace

import pytest
from step_setups import step_setup

from llmb.perfmodel.pipeline_schedule import bubble, ramp, rank_order
from llmb.perfmodel.step_time.step_constants import calibrated
from llmb.perfmodel.step_time.waterfall import step_terms, step_work


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


@pytest.mark.parametrize(("pp", "vp", "ga"), [(8, 5, 1), (8, 5, 3), (8, 2, 7), (4, 4, 4), (4, 3, 7), (8, None, 2)])
def test_the_ramp_is_that_of_the_schedule_with_fewer_micro_batches_than_ranks_too(pp: int, vp: int | None, ga: int):
    idle = ramp(pp, vp, ga)
    assert idle / (ga + idle) == pytest.approx(bubble(pp, vp, ga))


def test_a_step_of_fewer_micro_batches_than_stages_passes_through_all_of_them():
    """One micro-batch of 4 ranks with 5 stages each is in one stage at a time: ranks idle for three more of them."""
    setup = step_setup("llama3.1-70b", "h100", 16, "fp8", gbs=1, tp=4, pp=4, vp=5)
    shape = replace(setup.shape, model=replace(setup.shape.model, vocab=1))
    terms = step_terms(step_work(replace(setup, shape=shape)), calibrated())
    outside = ("dp", "optimizer", "overhead", "jitter", "engine")
    pipeline = sum(seconds for name, seconds in terms.items() if name not in outside)
    assert terms["bubble"] / pipeline == pytest.approx(3 / 4, abs=2e-3)
