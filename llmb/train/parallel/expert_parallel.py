"""Expert parallelism: the routed experts are sharded over ranks, and tokens are dispatched to them.

Every rank of a pipeline stage has its own tokens. Routed tokens, sorted by expert, go to the ranks of ep that hold the
experts, then to all ranks of etp, each of which holds a slice of every such expert's FFN width. There the rows are
permuted by expert once more and computed; the combine takes the same hops back and sums the slices' outputs. Both hops
are all-to-alls: the ranks of etp have different numbers of rows, so an all-gather would need padding, and an
all-gather before the routing would send each row to every ep rank etp times.

The split sizes are computed on the device, but the host needs them to allocate outputs: it synchronizes with the device
once per layer, in `split_sizes_to_host`, and such a layer cannot be captured in a CUDA graph.

Shapes: M routed tokens of this rank, H rows after the first hop, R after both, C hidden width, E experts (the `E` of
`_PE` and `_SPE` are those of one rank of ep), P ranks of ep, S of etp.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from llmb.models.architectures import Network
from llmb.models.moe import GroupedLinear, MoE, Router
from llmb.ops.dispatch import is_dry_run
from llmb.ops.moe.permute import permute_tokens, sort_by_expert, unpermute_tokens
from llmb.train.parallel.activation_collectives import all_gather, all_reduce
from llmb.train.parallel.local_shards import use_local_shards
from llmb.train.parallel.mesh import Mesh

RunExperts = Callable[[Tensor, Tensor], Tensor]


def apply_expert_parallel(model_part: Network, mesh: Mesh) -> None:
    """Shard the routed experts' weights, dispatch tokens to them, and balance load over all tokens."""
    for module in model_part.modules():
        if isinstance(module, Router) and mesh.size("cp") * mesh.size("tp") > 1:
            module.sum_over_ranks = partial(_sum_over_tokens, mesh)
        if isinstance(module, MoE) and mesh.size("ep") * mesh.size("etp") > 1:
            for layer, dim in ((module.gate, 1), (module.up, 1), (module.down, 2)):
                _shard_experts(layer, mesh, dim)
            run_experts = partial(dispatch_and_combine, mesh.submesh("ep"), mesh.submesh("etp"), module.run_experts)
            module.run_experts = run_experts  # type: ignore[method-assign]


def _shard_experts(layer: GroupedLinear, mesh: Mesh, dim: int) -> None:
    """Keep this rank's experts, and of each its slice along dimension `dim`."""
    assert mesh.expert is not None
    full = layer.weight
    shape = list(full.shape)
    shape[0] //= mesh.size("ep")
    shape[dim] //= mesh.size("etp")
    local = torch.empty(shape, dtype=full.dtype, device=full.device)
    dtensor = DTensor.from_local(local, mesh.expert["ep", "etp"], [Shard(0), Shard(dim)], run_check=False)
    layer.weight = nn.Parameter(dtensor)
    use_local_shards(layer)


def dispatch_and_combine(
    ep: DeviceMesh, etp: DeviceMesh, run_experts: RunExperts, x_MC: Tensor, ends_E: Tensor
) -> Tensor:
    """Dispatch rows to their experts, run this rank's experts with `run_experts` and combine the outputs."""
    rows_PE = ends_E.diff(prepend=ends_E.new_zeros(1)).view(ep.size(), -1)
    received_SPE = _received_counts(rows_PE, ep, etp)
    sent, *received = split_sizes_to_host(torch.cat((rows_PE.sum(1)[None], received_SPE.sum(2))), len(x_MC))
    from_ep = received[etp.get_local_rank()]
    held, from_etp = [sum(from_ep)] * etp.size(), [sum(rows) for rows in received]

    x_HC = _all_to_all(x_MC, sent, from_ep, ep)
    x_RC = _all_to_all(x_HC.expand(etp.size(), -1, -1).flatten(0, 1), held, from_etp, etp)
    row_R1, local_ends_E = _sort_received(received_SPE, len(x_RC))
    y_RC = unpermute_tokens(run_experts(permute_tokens(x_RC, row_R1), local_ends_E), row_R1)
    y_SHC = _all_to_all(y_RC, from_etp, held, etp).view(etp.size(), *x_HC.shape)
    return _all_to_all(y_SHC.sum(0) if len(y_SHC) > 1 else y_SHC[0], from_ep, sent, ep)


def split_sizes_to_host(rows_NP: Tensor, sent: int) -> list[list[int]]:
    """Copy split sizes to the host: the only synchronization with the device.

    In a dry run there are no values, and every expert is assumed to have the same load.
    """
    if is_dry_run():
        count, ranks = rows_NP.shape
        return [[(rank + 1) * sent // ranks - rank * sent // ranks for rank in range(ranks)]] * count
    return rows_NP.tolist()


def _received_counts(rows_PE: Tensor, ep: DeviceMesh, etp: DeviceMesh) -> Tensor:
    """Return how many rows each rank of etp and ep has for each of this rank's experts."""
    if ep.size() > 1:
        rows_PE = all_to_all_single(rows_PE, None, None, ep)
    return all_gather(rows_PE[None], etp, 0) if etp.size() > 1 else rows_PE[None]


def _all_to_all(x: Tensor, sent: list[int], received: list[int], mesh: DeviceMesh) -> Tensor:
    """Exchange rows with these split sizes; the backward pass is the inverse all-to-all."""
    return all_to_all_single_autograd(x, received, sent, mesh) if mesh.size() > 1 else x


def _sort_received(received_SPE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Apply `sort_by_expert` to rows that are ordered by source rank, and by expert within each."""
    experts = received_SPE.shape[2]
    expert_SPE = torch.arange(experts, device=received_SPE.device).expand(received_SPE.shape)
    expert_R = expert_SPE.flatten().repeat_interleave(received_SPE.flatten(), output_size=rows)
    return sort_by_expert(expert_R[:, None], experts)


def _sum_over_tokens(mesh: Mesh, sums: Tensor) -> Tensor:
    """Sum over the ranks that hold the tokens of one micro-batch, for an auxiliary loss that is equal on all of them.

    Each rank of cp weights its loss by 1 / cp, as for the mean of different losses; the gradient is scaled back here.
    """
    for dimension in ("cp", "tp"):
        if mesh.size(dimension) > 1:
            sums = all_reduce(sums, mesh.submesh(dimension))
    return _ScaleGradient.apply(sums, mesh.size("cp"))


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
