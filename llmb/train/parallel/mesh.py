"""Which rank of the layout this process is, and how it talks to the others.

The same ranks are divided twice, because the layers of a pipeline stage are: dense weights over (pp, dp, cp, tp) and
experts over (pp, edp, ep, etp), the last dimension innermost, so that those who talk most are neighbours. edp is what
is left: the ranks that hold the same experts.

Ranks leave the group by ending. To destroy it first could hang: gloo's destructor holds the interpreter's lock while it
waits for a thread that may be waiting for that lock.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmb.config.spec import Parallel, RunConfig
from llmb.runtime.rank_info import Place, join_ranks

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")
REPLICAS = "replicas"


@dataclass(frozen=True)
class Mesh(Place):
    """This rank's place among all. One process has no device meshes: all its sizes are 1."""

    parallel: Parallel = field(default_factory=Parallel)
    dense: DeviceMesh | None = None
    expert: DeviceMesh | None = None  # only where the model has experts
    replicas: DeviceMesh | None = None  # dp and cp as one: the ranks that hold the same dense weights

    def sub(self, dimension: str) -> DeviceMesh:
        """This rank's row along one dimension, by the names of both divisions."""
        whole = self.expert if dimension in ("edp", "ep", "etp") else self.dense
        assert whole is not None
        return whole[dimension]

    def size(self, dimension: str) -> int:
        """How many ranks a dimension counts."""
        if dimension == "edp":
            return self.parallel.expert_sharers
        return int(getattr(self.parallel, dimension))

    def index(self, dimension: str) -> int:
        """This rank's number along a dimension."""
        return 0 if self.dense is None else self.sub(dimension).get_local_rank()

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks of a small tensor; does not wait for the device."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value


def open_mesh(config: RunConfig) -> Mesh:
    """Find this rank's device and join the other ranks."""
    place = join_ranks(config, "llmb.train")
    if place.world_size == 1:
        return Mesh(place.rank, place.world_size, place.device)
    return divided(place.rank, place.device, config.parallel, experts=config.model.experts is not None)


def divided(rank: int, device: torch.device, parallel: Parallel, experts: bool) -> Mesh:
    """The ranks of the process group, which is there already, divided as the layout says."""
    shape = tuple(getattr(parallel, name) for name in DENSE)
    dense = init_device_mesh(device.type, shape, mesh_dim_names=DENSE)
    expert = None
    if experts:
        shape = (parallel.pp, parallel.expert_sharers, parallel.ep, parallel.etp)
        expert = init_device_mesh(device.type, shape, mesh_dim_names=EXPERT)
    replicas = dense["dp", "cp"]._flatten(REPLICAS)
    return Mesh(rank, parallel.world_size, device, parallel, dense, expert, replicas)
