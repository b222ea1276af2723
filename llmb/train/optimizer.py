"""AdamW and gradient clipping, on this rank's shards as plain tensors.

The update needs no communication, and one fused kernel can take shards of weights that are on different device meshes.
Only the gradient norm is reduced over all ranks.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from llmb.ops.gemm.weight_gradient import gradient_dtype
from llmb.runtime.adamw_settings import BETAS, EPS, WEIGHT_DECAY
from llmb.train.parallel.mesh import Mesh
from llmb.train.split_adam import SplitAdamW
from llmb.train.split_weights import SplitWeight

MAX_GRAD_NORM = 1.0

SHARDED = (Shard, _StridedShard)
MeshDims = tuple[DeviceMesh | None, tuple[int, ...]]  # some dimensions of a mesh


class Optimizer:
    """Fused AdamW over the parameters of this rank; weight decay for matrices only.

    torch's optimizer updates fp32 weights, `split_adam.py` split master weights.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        mesh: Mesh,
        lr: float,
        tied_copies: set[str],
        moments: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        self._mesh = mesh
        self.parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self.shards = {name: _shard(parameter) for name, parameter in self.parameters.items()}
        self._tied_copies = tied_copies  # weights whose gradients another pipeline rank counts in the norm
        split = {name: weight for name, weight in self.parameters.items() if isinstance(weight, SplitWeight)}
        self.split = SplitAdamW(split, moments, seed)
        unsplit = [shard for name, shard in self.shards.items() if name not in split]
        groups = [
            {"params": [p for p in unsplit if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in unsplit if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS, fused=True)

    @torch.no_grad()
    def update(self, lr: float) -> Tensor:
        """Clip the gradients, step and free them; return their norm before clipping, still on the device."""
        gradients = self._reduced_gradients()
        for name, gradient in gradients.items():
            if name not in self.split.weights:
                self.shards[name].grad = gradient
        norm = self._norm(gradients)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        # The interface of a gradient scaler: the fused step divides gradients as it reads them, without another pass,
        # and changes nothing when the norm is not finite, so the cause can still be found.
        scale, finite = ((norm + 1e-6) / MAX_GRAD_NORM).clamp(min=1.0), norm.isfinite()
        self.adamw.grad_scale = scale  # type: ignore[attr-defined]
        self.adamw.found_inf = finite.logical_not().float()  # type: ignore[attr-defined]
        self.adamw.step()
        self.split.update(gradients, lr, scale.reciprocal().where(finite, torch.nan))
        # The fused steps do not bump versions, and weights cached in other formats must be refreshed.
        torch.autograd.graph.increment_version([local(parameter) for parameter in self.parameters.values()])
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the AdamW state of each parameter, sharded like the parameter."""
        state = {name: self.adamw.state.get(shard, {}) for name, shard in self.shards.items()} | self.split.state()
        return {
            name: {kind: _sharded_like(tensor, parameter) for kind, tensor in state[name].items()}
            for name, parameter in self.parameters.items()
        }

    def init_state(self) -> None:
        """Allocate the AdamW state, to be loaded into: a step over zero gradients that changes nothing."""
        for group in self.adamw.param_groups:
            group["lr"] = 0.0  # set by each step
            for shard in group["params"]:
                shard.grad = torch.zeros_like(shard)
        self.adamw.step()
        self.split.init_state()
        self.zero_grad()

    def _reduced_gradients(self) -> dict[str, Tensor]:
        """Return this rank's shard of every gradient; partial gradients are all-reduced, concatenated per mesh."""
        gradients: dict[str, Tensor] = {}
        partials: dict[MeshDims, list[Tensor]] = defaultdict(list)
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None:  # the parameter was not used
                gradient = torch.zeros_like(self.shards[name], dtype=gradient_dtype(parameter))
            gradients[name] = local(gradient)
            partials[_mesh_dims(gradient, Partial)].append(gradients[name])
        for (mesh, dimensions), tensors in partials.items():
            if dimensions:
                total = torch.cat([tensor.flatten() for tensor in tensors])
                _all_reduce(total, mesh, dimensions)
                totals = total.split([tensor.numel() for tensor in tensors])
                sums = [flat.view_as(tensor) for flat, tensor in zip(totals, tensors, strict=True)]
                torch._foreach_copy_(tensors, sums)
        return gradients

    def _norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Return the norm over all weights of the model: reduced over the ranks of a stage, then over stages."""
        by_mesh: dict[MeshDims, list[Tensor]] = defaultdict(list)
        for name, parameter in self.parameters.items():
            if name not in self._tied_copies:
                by_mesh[_mesh_dims(parameter, SHARDED)].append(gradients[name])
        squares = torch.zeros((), device=self._mesh.device)
        for (mesh, dimensions), shards in by_mesh.items():
            local_squares = torch.stack(torch._foreach_norm(shards, dtype=torch.float32)).square().sum()
            squares += _all_reduce(local_squares, mesh, dimensions)
        if self._mesh.size("pp") > 1:
            dist.all_reduce(squares, group=self._mesh.submesh("pp").get_group())
        return squares.sqrt()


def _mesh_dims(tensor: Tensor, kinds: type[Placement] | tuple[type[Placement], ...]) -> MeshDims:
    """Return a tensor's mesh and the dimensions along which its placement is of these kinds."""
    if not isinstance(tensor, DTensor):
        return None, ()
    dimensions = (dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, kinds))
    return tensor.device_mesh, tuple(dimensions)


def _all_reduce(tensor: Tensor, mesh: DeviceMesh | None, dimensions: tuple[int, ...]) -> Tensor:
    """Sum in place over the ranks along some dimensions of a mesh."""
    for dimension in dimensions:
        assert mesh is not None
        if mesh.size(dimension) > 1:
            dist.all_reduce(tensor, group=mesh.get_group(dimension))
    return tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local(parameter.detach())) if isinstance(parameter, DTensor) else parameter


def _sharded_like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a tensor of a shard's shape as a DTensor placed like the parameter; step counters stay plain."""
    if not isinstance(parameter, DTensor) or tensor.ndim == 0:
        return tensor
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
