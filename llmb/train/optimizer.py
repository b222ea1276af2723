"""AdamW as language models are pretrained with it, and gradient clipping.

The optimizer works on this rank's slices as plain tensors: it needs no communication, and one fused kernel can take
slices of weights that are spread over different ranks. Only the norm is a sum over all of them.
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
from llmb.runtime.adamw_defaults import BETAS, EPS, WEIGHT_DECAY
from llmb.train.parallel.mesh import Mesh
from llmb.train.split_adam import HalvedAdam
from llmb.train.split_weights import HalvedWeight

MAX_GRAD_NORM = 1.0

CUT = (Shard, _StridedShard)  # placements of slices
Along = tuple[DeviceMesh | None, tuple[int, ...]]  # some dimensions of a mesh


class Optimizer:
    """Fused AdamW over the parameters of this rank; matrices decay, norm weights do not.

    torch's own updates whole weights, `split_adam.py` those in two halves.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        mesh: Mesh,
        lr: float,
        counted_elsewhere: set[str],
        moments: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        self._mesh = mesh
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.slices = {name: _slice(parameter) for name, parameter in self.parameters.items()}
        self._counted_elsewhere = counted_elsewhere  # copies of weights whose gradients another rank counts in the norm
        halved = {name: one for name, one in self.parameters.items() if isinstance(one, HalvedWeight)}
        self.halves = HalvedAdam(halved, moments, seed)
        whole = [one for name, one in self.slices.items() if name not in halved]
        groups = [
            {"params": [p for p in whole if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in whole if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS, fused=True)

    @torch.no_grad()
    def update(self, lr: float) -> Tensor:
        """Clip the gradients, step, drop them; returns their norm before clipping, still on the device."""
        gradients = self._settled()
        for name, gradient in gradients.items():
            if name not in self.halves.weights:
                self.slices[name].grad = gradient
        norm = self._norm(gradients)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        # What a gradient scaler would tell it: the fused step divides as it reads, in no pass of its own, and changes
        # nothing when the norm is not finite: what went wrong can still be found.
        scale, finite = ((norm + 1e-6) / MAX_GRAD_NORM).clamp(min=1.0), norm.isfinite()
        self.adamw.grad_scale = scale  # type: ignore[attr-defined]
        self.adamw.found_inf = finite.logical_not().float()  # type: ignore[attr-defined]
        self.adamw.step()
        self.halves.update(gradients, lr, scale.reciprocal().where(finite, torch.nan))
        # No fused step says so, and what was made of weights must be made anew.
        torch.autograd.graph.increment_version([local(parameter) for parameter in self.parameters.values()])
        self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        """Give their memory back."""
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What AdamW remembers of each parameter, spread over ranks as the parameter is."""
        state = {name: self.adamw.state.get(one, {}) for name, one in self.slices.items()} | self.halves.state()
        return {
            name: {kind: _spread_like(tensor, parameter) for kind, tensor in state[name].items()}
            for name, parameter in self.parameters.items()
        }

    def make_state(self) -> None:
        """Have AdamW make its state, to be read into: a step over zeros that changes nothing."""
        for group in self.adamw.param_groups:
            group["lr"] = 0.0  # each step sets its own
            for one in group["params"]:
                one.grad = torch.zeros_like(one)
        self.adamw.step()
        self.halves.make_state()
        self.drop_gradients()

    def _settled(self) -> dict[str, Tensor]:
        """This rank's slice of every gradient; what are parts of sums until now are added up, in one go if they can."""
        gradients: dict[str, Tensor] = {}
        summands: dict[Along, list[Tensor]] = defaultdict(list)
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None:  # nothing was computed with this parameter
                gradient = torch.zeros_like(self.slices[name], dtype=gradient_dtype(parameter))
            gradients[name] = local(gradient)
            summands[_along(gradient, Partial)].append(gradients[name])
        for (mesh, dimensions), parts in summands.items():
            if dimensions:
                total = torch.cat([part.flatten() for part in parts])
                _add_up(total, mesh, dimensions)
                totals = total.split([part.numel() for part in parts])
                torch._foreach_copy_(parts, [one.view_as(part) for one, part in zip(totals, parts, strict=True)])
        return gradients

    def _norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Over all weights of the model: ranks add up what they hold of the same weights, then pipeline stages do."""
        alike: dict[Along, list[Tensor]] = defaultdict(list)
        for name, parameter in self.parameters.items():
            if name not in self._counted_elsewhere:
                alike[_along(parameter, CUT)].append(gradients[name])
        squares = torch.zeros((), device=self._mesh.device)
        for (mesh, dimensions), slices in alike.items():
            own = torch.stack(torch._foreach_norm(slices, dtype=torch.float32)).square().sum()
            squares += _add_up(own, mesh, dimensions)
        if self._mesh.size("pp") > 1:
            dist.all_reduce(squares, group=self._mesh.sub("pp").get_group())
        return squares.sqrt()


def _along(tensor: Tensor, kinds: type[Placement] | tuple[type[Placement], ...]) -> Along:
    """The dimensions of its mesh along which a tensor is placed so; none, and no mesh, if this rank has all of it."""
    if not isinstance(tensor, DTensor):
        return None, ()
    placed = enumerate(tensor.placements)
    return tensor.device_mesh, tuple(number for number, placement in placed if isinstance(placement, kinds))


def _add_up(tensor: Tensor, mesh: DeviceMesh | None, dimensions: tuple[int, ...]) -> Tensor:
    """In place, over the ranks along some dimensions of a mesh."""
    for dimension in dimensions:
        assert mesh is not None
        if mesh.size(dimension) > 1:
            dist.all_reduce(tensor, group=mesh.get_group(dimension))
    return tensor


def local(tensor: Tensor) -> Tensor:
    """The memory of this rank's slice."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _slice(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local(parameter.detach())) if isinstance(parameter, DTensor) else parameter


def _spread_like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """A tensor made for a slice, as part of the whole; a counter is the same on all ranks."""
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
