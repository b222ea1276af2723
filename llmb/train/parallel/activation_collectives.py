"""Collectives on activations along one device mesh dimension, differentiable.

What the forward pass gathers, the backward pass reduces: each rank that used the full tensor has a partial gradient.

DTensor is imported at the first collective: that takes most of a second, and most runs on one GPU have none.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def all_gather(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Concatenate all ranks' shards along a dimension; the backward pass is a reduce-scatter."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return _redistribute(x, mesh, Shard(dim), Replicate(), gradient=Partial())


def reduce_scatter(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's shard, along a dimension, of the sum over ranks; the backward pass is an all-gather."""
    from torch.distributed.tensor import Partial, Shard

    return _redistribute(x, mesh, Partial(), Shard(dim), gradient=Shard(dim))


def all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum over ranks, all of which then compute the same; the backward pass is the identity."""
    from torch.distributed.tensor import Partial, Replicate

    return _redistribute(x, mesh, Partial(), Replicate(), gradient=Replicate())


def _redistribute(
    x: Tensor, mesh: DeviceMesh, before: "Placement", after: "Placement", gradient: "Placement"
) -> Tensor:
    from torch.distributed.tensor import DTensor

    dtensor = DTensor.from_local(x, mesh, [before], run_check=False)
    return dtensor.redistribute(placements=[after]).to_local(grad_placements=[gradient])
