"""The pipeline order that perfmodel computes without torch equals that of torch's schedules."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B, _ComputationType

from llmb.perfmodel.pipeline_schedule import rank_order


def passes(actions: list[Any], pp: int) -> list[tuple[int, int, bool]]:
    """Return model part, micro-batch and direction of torch's actions, without idle steps and reductions."""
    kinds = {_ComputationType.FORWARD: True, _ComputationType.FULL_BACKWARD: False}
    compute = [action for action in actions if action is not None and action.computation_type in kinds]
    return [(action.stage_index // pp, action.microbatch_index, kinds[action.computation_type]) for action in compute]


@pytest.mark.parametrize(("pp", "vp", "ga"), [(8, 8, 64), (8, 5, 64), (4, 2, 8), (2, 2, 2), (4, 3, 10)])
def test_interleaved_order_equals_torch(pp: int, vp: int, ga: int) -> None:
    rounds = max(1, ga // pp)
    schedule = SimpleNamespace(
        n_local_stages=vp, pp_group_size=pp, _n_microbatches=ga, microbatches_per_round=ga // rounds
    )
    for rank in range(pp):
        actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, rank)  # type: ignore[arg-type]
        assert passes(actions, pp) == [tuple(action) for action in rank_order(pp, vp, ga, rank)]


def test_1f1b_order_equals_torch() -> None:
    """torch numbers the last stage's forward passes from 1 here, though it runs them from 0: compare directions."""
    schedule = SimpleNamespace(_num_stages=4, _n_microbatches=8)
    for rank, actions in Schedule1F1B._get_pipeline_order(schedule).items():  # type: ignore[arg-type, union-attr]
        expected = [action.forward for action in rank_order(4, None, 8, rank)]
        assert [forward for _, _, forward in passes(actions, 4)] == expected
