"""Expert parallelism: the routed experts are sharded over ranks, and tokens are dispatched to them.

Every rank of a pipeline stage has its own tokens. Routed tokens, sorted by expert, go to the ranks of ep that hold the
experts in an all-to-all; an all-gather then gives them to all ranks of etp, each of which holds a slice of every such
expert's FFN width. There the rows are sorted by expert once more and computed; the combine takes the same hops back, of
which the reduce-scatter sums the slices' outputs.

The host never reads how many tokens an expert has, so it need not wait for the device, and such a layer can be captured
in a CUDA graph. Instead each pair of ranks exchanges a fixed number of rows, its capacity, of which some are padding:
expert GEMMs skip it, and whatever it holds reaches no result. A pair with more rows than its capacity sets a flag on
the device. Then the step updates no weights, and is repeated with a larger capacity (`loop.train_step`): no token is
ever dropped from a step that counts.

Shapes: N tokens, K experts per token, H rows of the send buffer, R rows received from all ranks of ep and etp, C hidden
width, E experts (the `E` of `_PE` are those of one rank of ep), P ranks of ep.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmb.models.architectures import Network
from llmb.models.moe import GroupedLinear, MoE, Router
from llmb.ops.moe.expert_dispatch import assign_send_rows, sort_received_rows
from llmb.ops.moe.permute import permute_tokens, sort_by_expert, unpermute_tokens
from llmb.perfmodel.expert_capacity import CAPACITY_FACTOR, pair_capacity
from llmb.train.module_class import use_class
from llmb.train.parallel.activation_collectives import all_gather, all_reduce, reduce_scatter
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.parameter_shard import local_parameter

RunExperts = Callable[[Tensor, Tensor], Tensor]


def apply_expert_parallel(model_part: Network, mesh: Mesh, capacity_factor: float = CAPACITY_FACTOR) -> None:
    """Shard the routed experts' weights, dispatch tokens to them, and balance load over all tokens."""
    dispatcher = ExpertDispatcher(mesh, capacity_factor) if mesh.size("ep") * mesh.size("etp") > 1 else None
    vars(model_part)["dispatcher"] = dispatcher
    meshes = [mesh.submesh(dimension) for dimension in ("cp", "tp") if mesh.size(dimension) > 1]
    for module in model_part.modules():
        if isinstance(module, Router) and meshes:
            module.sum_over_ranks = partial(_sum_over_tokens, meshes, mesh.size("cp"))
        if isinstance(module, MoE) and dispatcher is not None:
            for layer, dim in ((module.gate, 1), (module.up, 1), (module.down, 2)):
                _shard_experts(layer, mesh, dim)
            use_class(module, ShardedMoE, dispatcher=dispatcher)


class ShardedMoE(MoE):
    """MoE with this rank's experts."""

    dispatcher: "ExpertDispatcher"

    def assign_rows(self, topk_ids_NK: Tensor) -> tuple[Tensor, Tensor, int]:
        return self.dispatcher.assign_rows(self.router.experts.count, topk_ids_NK)

    def run_experts(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        return self.dispatcher.dispatch_and_combine(super().run_experts, x_MC, ends_E)


def _shard_experts(layer: GroupedLinear, mesh: Mesh, dim: int) -> None:
    """Keep this rank's experts, and of each its slice along dimension `dim`."""
    cuts = [(0, mesh.index("ep"), mesh.size("ep")), (dim, mesh.index("etp"), mesh.size("etp"))]
    layer.weight = local_parameter(layer.weight, cuts, "edp")
    if layer.bias is not None:  # etp, whose ranks would each add it, is refused with biases: `parallel_layout.py`
        layer.bias = local_parameter(layer.bias, cuts[:1], "edp")


class ExpertDispatcher:
    """All-to-alls of the routed tokens of all MoE layers in a model part."""

    def __init__(self, mesh: Mesh, capacity_factor: float):
        self._ep, self._etp = mesh.submesh("ep"), mesh.submesh("etp")
        self.capacity_factor = capacity_factor
        self.overflow = torch.zeros((), device=mesh.device)  # pairs that exceeded their capacity in this step

    def assign_rows(self, experts: int, topk_ids_NK: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return each routed token's row in the send buffer, expert ends in each rank's part of it, and its rows.

        Rows are sorted by expert; what exceeds the capacity is dropped, and counted in `overflow`.
        """
        row_map_NK, ends_E = sort_by_expert(topk_ids_NK, experts)
        ranks, rows = self._ep.size(), topk_ids_NK.numel()
        ends_PE = ends_E.view(ranks, -1)
        if ranks == 1:
            return row_map_NK, ends_PE, rows
        capacity = pair_capacity(rows, experts, ranks, self.capacity_factor)
        row_map_NK, ends_PE = assign_send_rows(topk_ids_NK, row_map_NK, ends_PE, capacity, self.overflow)
        return row_map_NK, ends_PE, ranks * capacity

    def dispatch_and_combine(self, run_experts: RunExperts, x_HC: Tensor, ends_PE: Tensor) -> Tensor:
        """Dispatch rows to their experts, run this rank's experts with `run_experts` and combine the outputs."""
        ends_PE, x_RC = _all_to_all(ends_PE, self._ep), _all_to_all(x_HC, self._ep)
        if self._etp.size() > 1:
            ends_PE, x_RC = all_gather(ends_PE, self._etp, 0), all_gather(x_RC, self._etp, 0)
        row_R1, ends_E = sort_received_rows(ends_PE, len(x_RC))
        y_RC = unpermute_tokens(run_experts(permute_tokens(x_RC, row_R1), ends_E), row_R1)
        if self._etp.size() > 1:
            y_RC = reduce_scatter(y_RC, self._etp, 0)
        return _all_to_all(y_RC, self._ep)


def expert_dispatchers(model_parts: Iterable[nn.Module]) -> list[ExpertDispatcher]:
    """Return the dispatcher of each model part; none without expert parallelism."""
    dispatchers = (vars(model_part)["dispatcher"] for model_part in model_parts)
    return [dispatcher for dispatcher in dispatchers if dispatcher is not None]


def pop_overflow(dispatchers: Sequence[ExpertDispatcher], device: torch.device) -> Tensor:
    """Return how often a pair of this rank exceeded its capacity since the last call, still on the device."""
    if not dispatchers:
        return torch.zeros((), device=device)
    overflows = [dispatcher.overflow for dispatcher in dispatchers]
    total = torch.stack(overflows).sum()
    torch._foreach_zero_(overflows)
    return total


def grow_capacity(dispatchers: Sequence[ExpertDispatcher], ep: int) -> str:
    """Double the capacity, up to where nothing can exceed it; return a text that says so."""
    before = dispatchers[0].capacity_factor
    for dispatcher in dispatchers:
        dispatcher.capacity_factor = min(2 * before, ep)
    return f"capacity factor {before:g} -> {dispatchers[0].capacity_factor:g}"


def _all_to_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Send an equal number of rows to each rank; the backward pass is the same."""
    return x if mesh.size() == 1 else _AllToAll.apply(x, mesh)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=mesh.get_group())
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.mesh), None


def _sum_over_tokens(meshes: Sequence[DeviceMesh], cp: int, sums: Tensor) -> Tensor:
    """Sum over the ranks that hold the tokens of one micro-batch, for an auxiliary loss that is equal on all of them.

    Each rank of cp weights its loss by 1 / cp, as for the mean of different losses; the gradient is scaled back here.
    """
    for mesh in meshes:
        sums = all_reduce(sums, mesh)
    if sums.requires_grad and cp > 1:
        sums.register_hook(lambda grad: grad * cp)
    return sums
