"""Device meshes of the parallel layout, and this rank's coordinates in them.

There are two meshes over the same ranks: (pp, dp, cp, tp) for dense weights and (pp, edp, ep, etp) for experts. The
last dimension is innermost, so that ranks that communicate most are adjacent. edp counts the ranks that hold the same
experts.

Process groups are not destroyed before exit, which could deadlock: gloo's destructor holds the GIL while it waits for a
thread that may be waiting for the GIL.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmb.config.spec import Parallel, RunConfig
from llmb.runtime.rank_info import RankInfo, init_distributed

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")
REPLICAS = "replicas"  # dp and cp: the ranks that hold the same dense weights
STAGE = "stage"  # dp, cp and tp: all ranks of a pipeline stage


class Replicas(NamedTuple):
    """Ranks that hold the same values, and this rank's position among them."""

    ranks: int = 1
    position: int = 0
    group: dist.ProcessGroup | None = None  # none: no collectives


@dataclass(frozen=True)
class Mesh(RankInfo):
    """Device meshes and this rank's coordinates. A single process has no meshes, and all sizes are 1."""

    parallel: Parallel = field(default_factory=Parallel)
    dense: DeviceMesh | None = None
    expert: DeviceMesh | None = None  # only for models with experts
    replicas: DeviceMesh | None = None
    stage: DeviceMesh | None = None

    def submesh(self, dimension: str) -> DeviceMesh:
        """Return this rank's submesh along one dimension of either mesh."""
        mesh = self.expert if dimension in ("edp", "ep", "etp") else self.dense
        assert mesh is not None
        return mesh[dimension]

    def size(self, dimension: str) -> int:
        """Return the number of ranks along a dimension."""
        if dimension == "edp":
            return self.parallel.expert_dp_size
        return int(getattr(self.parallel, dimension))

    def index(self, dimension: str) -> int:
        """Return this rank's coordinate along a dimension."""
        return 0 if self.dense is None else self.submesh(dimension).get_local_rank()

    def replicas_of(self, dimension: str) -> Replicas:
        """Return the ranks along replicas, stage or edp, which hold the same values."""
        if self.dense is None:
            return Replicas()
        flattened = {REPLICAS: self.replicas, STAGE: self.stage}
        mesh = flattened[dimension] if dimension in flattened else self.submesh(dimension)
        assert mesh is not None
        is_alone = mesh.size() == 1 and self.world_size > 1  # the only rank of a world communicates with itself
        return Replicas() if is_alone else Replicas(mesh.size(), mesh.get_local_rank(), mesh.get_group())

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum a small tensor over all ranks, in place; does not synchronize with the device."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value


def init_mesh(config: RunConfig) -> Mesh:
    """Select this rank's device, initialize the process group and build the meshes."""
    rank_info = init_distributed(config, "llmb.train")
    if rank_info.world_size == 1:
        return Mesh(rank_info.rank, rank_info.world_size, rank_info.device)
    return build_mesh(rank_info.rank, rank_info.device, config.parallel, experts=config.model.experts is not None)


def build_mesh(rank: int, device: torch.device, parallel: Parallel, experts: bool) -> Mesh:
    """Build the device meshes of a layout over the existing process group."""
    shape = tuple(getattr(parallel, name) for name in DENSE)
    dense = init_device_mesh(device.type, shape, mesh_dim_names=DENSE)
    expert = None
    if experts:
        shape = (parallel.pp, parallel.expert_dp_size, parallel.ep, parallel.etp)
        expert = init_device_mesh(device.type, shape, mesh_dim_names=EXPERT)
    replicas = dense["dp", "cp"]._flatten(REPLICAS)
    stage = dense["dp", "cp", "tp"]._flatten(STAGE) if parallel.tp > 1 else replicas
    return Mesh(rank, parallel.world_size, device, parallel, dense, expert, replicas, stage)
