"""Which rank shares what with whom when a model is served.

    ranks = join_groups(config, place)

Ranks count along tensor, then pipeline parallelism: stage s is the ranks s * tp to (s + 1) * tp. Those of a stage share
every matrix; with attention data parallelism they share the experts only, and each has requests of its own. Of the
experts, ep ranks have different ones, and each group of tp / ep neighbours has the same, cut by width.
"""

import torch.distributed as dist

from llmb.config.spec import Inference, Parallel, RunConfig
from llmb.runtime.rank_info import Place
from llmb.serve.group_collectives import LinkedStage, SpreadExperts, TensorExperts, TensorGroup
from llmb.serve.rank_groups import ALONE, ExpertGroup, Group, Ranks, Stage


def join_groups(config: RunConfig, place: Place) -> Ranks:
    """This rank's groups; every rank of the run must call it, and together."""
    split, work = config.parallel, config.workload
    assert isinstance(work, Inference)
    stage, dense, experts = _stage(split, place), ALONE, ExpertGroup()
    if split.tp > 1:
        neighbours = [list(range(first, first + split.tp)) for first in range(0, place.world_size, split.tp)]
        tensor, index = _own_group(neighbours), place.rank % split.tp
        share = _share(index, split)
        if not work.attention_dp:
            dense = TensorGroup(index, split.tp, process_group=tensor)
            experts = TensorExperts(*share, process_group=tensor)
        elif config.model.experts is not None:
            experts = SpreadExperts(*share, process_group=tensor, control=_own_group(neighbours, "gloo"))
    return Ranks(place.device, dense, experts, stage, place.world_size)


def _share(index: int, split: Parallel) -> tuple[int, int, Group]:
    """Which experts the rank of this place in its stage has, of how many shares, and which part of their width."""
    cut = split.tp // split.ep
    return index // cut, split.ep, Group(index % cut, cut)


def _stage(split: Parallel, place: Place) -> Stage:
    if split.pp == 1:
        return Stage()
    columns = [list(range(first, place.world_size, split.tp)) for first in range(split.tp)]
    return LinkedStage(place.rank // split.tp, split.pp, process_group=_own_group(columns))


def _own_group(members: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Of disjoint groups of all ranks, the one that this rank is in."""
    own, _ = dist.new_subgroups_by_enumeration(members, backend=backend)
    assert own is not None
    return own
