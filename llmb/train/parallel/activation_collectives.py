"""Collectives on activations along one device mesh dimension, differentiable.

What the forward pass gathers, the backward pass reduces: each rank that used the full tensor has a partial gradient.
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def all_gather(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Concatenate all ranks' shards along a dimension; the backward pass is a reduce-scatter."""
    return _redistribute(x, mesh, Shard(dim), Replicate(), gradient=Partial())


def reduce_scatter(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's shard, along a dimension, of the sum over ranks; the backward pass is an all-gather."""
    return _redistribute(x, mesh, Partial(), Shard(dim), gradient=Shard(dim))


def all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum over ranks, all of which then compute the same; the backward pass is the identity."""
    return _redistribute(x, mesh, Partial(), Replicate(), gradient=Replicate())


def _redistribute(x: Tensor, mesh: DeviceMesh, before: Placement, after: Placement, gradient: Placement) -> Tensor:
    dtensor = DTensor.from_local(x, mesh, [before], run_check=False)
    return dtensor.redistribute(placements=[after]).to_local(grad_placements=[gradient])
