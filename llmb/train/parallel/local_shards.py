"""Modules whose parameters are spread over ranks compute on the part that this rank holds.

    see_local(module)          # module.weight, a DTensor in state_dict(), now reads as a plain local tensor

Parameters stay DTensors, so that checkpoints can be read by any layout, gradients are reduced by what they are, and
nothing inside the module knows of ranks. A weight that all ranks hold whole meets only this rank's tokens there, since
the stream of activations is split along the sequence: its gradient is a part of a sum.
"""

from functools import cache
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from llmb.train.parallel.mesh import REPLICAS


def see_local(module: nn.Module) -> None:
    """From now on the module's own parameters read as local tensors; those of modules inside it are not touched."""
    module.__class__ = _with_local_view(type(module))  # type: ignore[arg-type]  # mypy takes no metaclass for hashable


def local_part(parameter: DTensor) -> Any:
    """A view of this rank's part, through which gradients flow back."""
    return parameter.to_local(grad_placements=[_gradient_placement(one) for one in parameter.placements])


def _gradient_placement(placement: Placement) -> Placement:
    return Partial() if isinstance(placement, Replicate) else placement


def is_put_away(parameter: DTensor) -> bool:
    """Sharded over replicas: before it is computed with it is gathered, and another takes its place."""
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name in (REPLICAS, "edp") and not isinstance(placement, Replicate)
        for name, placement in zip(names, parameter.placements, strict=True)
    )


@cache
def _with_local_view(kind: type[nn.Module]) -> type[nn.Module]:
    def __getattr__(self: nn.Module, name: str) -> Any:
        value = kind.__getattr__(self, name)
        return local_part(value) if isinstance(value, DTensor) and not is_put_away(value) else value

    return type(kind.__name__, (kind,), {"__getattr__": __getattr__, "__module__": kind.__module__})
