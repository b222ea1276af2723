"""Expert parallelism: the routed experts are on several ranks, and tokens travel to them.

Every rank of a pipeline stage has tokens of its own. Their copies, sorted by expert, go to the ranks of ep that hold
the experts; from there to all ranks of etp, each of which holds a slice of every such expert's width. There the rows
are sorted by expert once more and computed; the slices' results are added up on the way back, which is the same way.
Both hops are all-to-alls: the ranks of etp have different numbers of rows, so a gather would have to pad them, and a
gather before the routing would send each row to every ep rank etp times.

How many rows travel is known on the device only. The host must know it too, to make room: it waits for the device once
a layer, in `on_host`, and such a layer cannot be captured in a CUDA graph.

Shapes: M copies of this rank's tokens, H rows after the first hop, R after both, C hidden width, E experts (the `E` of
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
from llmb.models.moe import ExpertMlp, GroupedLinear, Router
from llmb.ops.dispatch import is_dry_run
from llmb.ops.moe.permute import copied, mixed, sorted_by_expert
from llmb.train.parallel.activation_collectives import gathered, summed
from llmb.train.parallel.local_shards import see_local
from llmb.train.parallel.mesh import Mesh

Visit = Callable[[Tensor, Tensor], Tensor]


def split_experts(part: Network, mesh: Mesh) -> None:
    """Cut the routed experts' weights among ranks, and let their rows travel; balance them over all tokens."""
    for module in part.modules():
        if isinstance(module, Router) and mesh.size("cp") * mesh.size("tp") > 1:
            module.over_all_tokens = partial(_over_all_tokens, mesh)
        if isinstance(module, ExpertMlp) and mesh.size("ep") * mesh.size("etp") > 1:
            for layer, cut in ((module.gate, 1), (module.up, 1), (module.down, 2)):
                _spread(layer, mesh, cut)
            visit = partial(visit_over_ranks, mesh.sub("ep"), mesh.sub("etp"), module.visit)
            module.visit = visit  # type: ignore[method-assign]


def _spread(layer: GroupedLinear, mesh: Mesh, cut: int) -> None:
    """Keep this rank's experts, and of each its slice along one dimension."""
    assert mesh.expert is not None
    whole = layer.weight
    shape = list(whole.shape)
    shape[0] //= mesh.size("ep")
    shape[cut] //= mesh.size("etp")
    local = torch.empty(shape, dtype=whole.dtype, device=whole.device)
    spread = DTensor.from_local(local, mesh.expert["ep", "etp"], [Shard(0), Shard(cut)], run_check=False)
    layer.weight = nn.Parameter(spread)
    see_local(layer)


def visit_over_ranks(ep: DeviceMesh, etp: DeviceMesh, visit: Visit, x_MC: Tensor, ends_E: Tensor) -> Tensor:
    """What every expert makes of its rows, wherever it is; `visit` computes this rank's share of its own experts."""
    rows_PE = ends_E.diff(prepend=ends_E.new_zeros(1)).view(ep.size(), -1)
    arriving_SPE = _arriving(rows_PE, ep, etp)
    sent, *arriving = on_host(torch.cat((rows_PE.sum(1)[None], arriving_SPE.sum(2))), len(x_MC))
    from_ep = arriving[etp.get_local_rank()]
    held, from_etp = [sum(from_ep)] * etp.size(), [sum(rows) for rows in arriving]

    x_HC = _travelled(x_MC, sent, from_ep, ep)
    x_RC = _travelled(x_HC.expand(etp.size(), -1, -1).flatten(0, 1), held, from_etp, etp)
    places_R1, own_ends_E = _sorted_arrivals(arriving_SPE, len(x_RC))
    y_RC = mixed(visit(copied(x_RC, places_R1), own_ends_E), places_R1)
    y_SHC = _travelled(y_RC, from_etp, held, etp).view(etp.size(), *x_HC.shape)
    return _travelled(y_SHC.sum(0) if len(y_SHC) > 1 else y_SHC[0], from_ep, sent, ep)


def on_host(rows_NP: Tensor, sent: int) -> list[list[int]]:
    """How many rows travel, read where the host can use it: the one wait for the device.

    Where there are no numbers to read, as many as if every expert had the same load: all counts are alike then.
    """
    if is_dry_run():
        others, ranks = rows_NP.shape
        return [[(number + 1) * sent // ranks - number * sent // ranks for number in range(ranks)]] * others
    return rows_NP.tolist()


def _arriving(rows_PE: Tensor, ep: DeviceMesh, etp: DeviceMesh) -> Tensor:
    """How many rows each rank of etp and ep has for each of this rank's experts."""
    if ep.size() > 1:
        rows_PE = all_to_all_single(rows_PE, None, None, ep)
    return gathered(rows_PE[None], etp, 0) if etp.size() > 1 else rows_PE[None]


def _travelled(x: Tensor, sent: list[int], received: list[int], mesh: DeviceMesh) -> Tensor:
    """Rows given to other ranks, so many to each, for those that they gave; backward, gradients take the way back."""
    return all_to_all_single_autograd(x, received, sent, mesh) if mesh.size() > 1 else x


def _sorted_arrivals(arriving_SPE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """As `sorted_by_expert`, for rows that came from rank after rank, those of each sorted by expert."""
    experts = arriving_SPE.shape[2]
    each_SPE = torch.arange(experts, device=arriving_SPE.device).expand(arriving_SPE.shape)
    expert_R = each_SPE.flatten().repeat_interleave(arriving_SPE.flatten(), output_size=rows)
    return sorted_by_expert(expert_R[:, None], experts)


def _over_all_tokens(mesh: Mesh, sums: Tensor) -> Tensor:
    """The sums over the ranks that have the tokens of one micro-batch, for a loss that all of them then have whole.

    Each rank of cp weighs its loss by 1 / cp, as the mean over ranks that have different losses asks for.
    """
    for dimension in ("cp", "tp"):
        if mesh.size(dimension) > 1:
            sums = summed(sums, mesh.sub(dimension))
    return _WeighedGradient.apply(sums, mesh.size("cp"))


class _WeighedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: int) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.weight, None
