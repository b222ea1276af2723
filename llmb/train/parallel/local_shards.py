"""Modules with DTensor parameters compute on this rank's local shards.

    use_local_shards(module)          # module.weight, a DTensor in state_dict(), now reads as a plain local tensor

Parameters stay DTensors, so that checkpoints can be read by any layout and gradients are reduced by their placements,
but the module's code sees plain tensors. A replicated weight only sees this rank's tokens, since activations are
sharded along the sequence: its gradient is partial.
"""

from functools import cache
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from llmb.train.parallel.mesh import REPLICAS


def use_local_shards(module: nn.Module) -> None:
    """Make the module's direct parameters read as local tensors; submodules are not changed."""
    module.__class__ = _with_local_view(type(module))  # type: ignore[arg-type]  # mypy takes no metaclass for hashable


def local_shard(parameter: DTensor) -> Any:
    """Return a differentiable view of this rank's shard."""
    return parameter.to_local(grad_placements=[_gradient_placement(placement) for placement in parameter.placements])


def _gradient_placement(placement: Placement) -> Placement:
    return Partial() if isinstance(placement, Replicate) else placement


def is_fsdp_sharded(parameter: DTensor) -> bool:
    """Return whether a parameter is sharded over replicas by FSDP, which gathers it into another tensor before use."""
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name in (REPLICAS, "edp") and not isinstance(placement, Replicate)
        for name, placement in zip(names, parameter.placements, strict=True)
    )


@cache
def _with_local_view(kind: type[nn.Module]) -> type[nn.Module]:
    def __getattr__(self: nn.Module, name: str) -> Any:
        value = kind.__getattr__(self, name)
        return local_shard(value) if isinstance(value, DTensor) and not is_fsdp_sharded(value) else value

    return type(kind.__name__, (kind,), {"__getattr__": __getattr__, "__module__": kind.__module__})
