"""The activations that ranks of one device mesh dimension exchange, with the gradients that flow back.

What one direction of a pass gathers, the other adds up: where each rank used the whole of a tensor for its own part of
the work, each has a part of that tensor's gradient.
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def gathered(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """All ranks' slices along a dimension, one after the other; backward, each rank's slice of the summed gradients."""
    return _exchanged(x, mesh, Shard(dim), Replicate(), gradient=Partial())


def scattered_sum(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's slice, along a dimension, of the sum over ranks; backward, the slices' gradients are gathered."""
    return _exchanged(x, mesh, Partial(), Shard(dim), gradient=Shard(dim))


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over ranks, with which all compute the same from then on; backward, every summand has its gradient."""
    return _exchanged(x, mesh, Partial(), Replicate(), gradient=Replicate())


def _exchanged(x: Tensor, mesh: DeviceMesh, before: Placement, after: Placement, gradient: Placement) -> Tensor:
    spread = DTensor.from_local(x, mesh, [before], run_check=False)
    return spread.redistribute(placements=[after]).to_local(grad_placements=[gradient])
