"""Process groups of a served model.

    groups = join_groups(config, rank_info)

Ranks count along tensor, then pipeline parallelism: stage s has the ranks s * tp to (s + 1) * tp. The ranks of a stage
shard every matrix; with attention data parallelism they shard the experts only, and each has its own requests. Of the
experts, ep ranks have different ones, and each group of tp / ep neighbors has slices of the same ones.
"""

import torch.distributed as dist

from llmb.config.spec import Inference, Parallel, RunConfig
from llmb.runtime.rank_info import RankInfo
from llmb.serve.group_collectives import (
    DataParallelExperts,
    DistributedStageGroup,
    TensorParallelExperts,
    TensorParallelGroup,
)
from llmb.serve.rank_groups import SINGLE_RANK, ExpertGroup, RankGroup, RankGroups, StageGroup


def join_groups(config: RunConfig, rank_info: RankInfo) -> RankGroups:
    """Create this rank's groups; a collective call of all ranks."""
    parallel, work = config.parallel, config.workload
    assert isinstance(work, Inference)
    stage, tp, experts = _stage_group(parallel, rank_info), SINGLE_RANK, ExpertGroup()
    if parallel.tp > 1:
        members = [list(range(first, first + parallel.tp)) for first in range(0, rank_info.world_size, parallel.tp)]
        process_group, index = _new_group(members), rank_info.rank % parallel.tp
        expert_shard = _expert_shard(index, parallel)
        if not work.attention_dp:
            tp = TensorParallelGroup(index, parallel.tp, process_group=process_group)
            experts = TensorParallelExperts(*expert_shard, process_group=process_group)
        elif config.model.experts is not None:
            control = _new_group(members, "gloo")
            experts = DataParallelExperts(*expert_shard, process_group=process_group, control=control)
    return RankGroups(rank_info.device, tp, experts, stage, rank_info.world_size)


def _expert_shard(index: int, parallel: Parallel) -> tuple[int, int, RankGroup]:
    """Return the expert shard of this index in the stage, the number of shards, and the slice of the experts' width."""
    expert_tp = parallel.tp // parallel.ep
    return index // expert_tp, parallel.ep, RankGroup(index % expert_tp, expert_tp)


def _stage_group(parallel: Parallel, rank_info: RankInfo) -> StageGroup:
    if parallel.pp == 1:
        return StageGroup()
    members = [list(range(first, rank_info.world_size, parallel.tp)) for first in range(parallel.tp)]
    return DistributedStageGroup(rank_info.rank // parallel.tp, parallel.pp, process_group=_new_group(members))


def _new_group(members: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Create disjoint groups of all ranks and return the one this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration(members, backend=backend)
    assert group is not None
    return group
