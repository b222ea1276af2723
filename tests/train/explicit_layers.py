"""Llama layers on this rank of a layout, without the engine around them: weights, inputs and what they compute.

network = plain_network(MODEL)
part = explicit_part(network, "bf16", mesh, mbs=2)
result = run_layers(part, x_BTC, dy_BTC, mesh)          # on this rank
full_result([result, ...], Parallel(tp=2, cp=2))        # of all ranks
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from small_config import CONFIG, changed
from torch import Tensor, nn

from llmb.config.spec import Model, Parallel, Training
from llmb.models.llama import Llama
from llmb.ops.quant.delayed_scaling import DelayedScaling, Scaling
from llmb.train.llama_layers import begin_step, explicit_layers, init_fp8_scaling, use_explicit_layers
from llmb.train.parallel.context_parallel import ContextParallel, chunk_indices, shard_positions
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.sequence_parallel import SequenceParallel

ROWS = ("q", "k", "v", "gate", "up")  # column-parallel


@dataclass
class LayersResult:
    """Output of the layers, gradient of their input, and gradients of their weights by name."""

    out_BTC: Tensor
    dx_BTC: Tensor
    grads: dict[str, Tensor]

    def errors(self, expected: "LayersResult") -> dict[str, float]:
        """Return the relative error of each tensor."""
        actual, reference = ({"out": r.out_BTC, "dx": r.dx_BTC, **r.grads} for r in (self, expected))
        assert actual.keys() == reference.keys()
        return {name: _error(actual[name], reference[name]) for name in reference}


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def plain_network(model: Model) -> Llama:
    """Return a network with weights so large that every part of the gradient matters, and norms other than one."""
    network, generator = Llama(model), torch.Generator().manual_seed(7)
    for parameter in network.parameters():
        parameter.data.normal_(0.0, 0.15, generator=generator)
        parameter.data += parameter.ndim == 1
    return network


def explicit_part(
    network: Llama,
    dtype: str,
    mesh: Mesh,
    scaling: Any = None,
    recomputed: bool = False,
    weights: torch.dtype | None = None,
    **changes: object,
) -> Llama:
    """Turn a plain network into this rank's part of it, with explicit layers and weights of that dtype."""
    workload = changed(CONFIG, dtype=dtype, **changes).workload
    assert isinstance(workload, Training)
    tp = cp = None
    if mesh.size("tp") > 1:
        tp = SequenceParallel(mesh.submesh("tp").get_group(), workload.mbs)
    if mesh.size("cp") > 1:
        cp = ContextParallel(mesh.submesh("cp"))
    for layer in network.layers:
        for linears in (*layer.merged_linears, (layer.attention.o,), (layer.mlp.down,)):
            _shard(linears, mesh, weights or (torch.float32 if dtype == "fp32" else torch.bfloat16))
    use_explicit_layers(network, dtype, workload, tp, cp)
    init_fp8_scaling(network, scaling or new_scaling)
    for layer in explicit_layers(network):
        layer.recomputed = recomputed
    network.positions = lambda tokens, device: (
        torch.arange(tokens * mesh.size("tp"), device=device)
        if mesh.size("cp") == 1
        else shard_positions(mesh.index("cp"), mesh.size("cp"), tokens * mesh.size("tp"), device)
    )
    begin_step(network)
    return network


def new_scaling(dtypes: dict[str, torch.dtype], device: torch.device) -> Scaling:
    """Return delayed scales of all ranks."""
    reduce_max = (lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)) if dist.is_initialized() else None
    return DelayedScaling(dtypes, device, reduce_max)


def _shard(linears: tuple[nn.Linear, ...], mesh: Mesh, dtype: torch.dtype) -> None:
    """Replace weights by this rank's shards, contiguous in memory, with gradients in fp32."""
    dim = 0 if len(linears) > 1 else 1  # merged linears are column-parallel, the others row-parallel
    shards = [linear.weight.detach().chunk(mesh.size("tp"), dim)[mesh.index("tp")] for linear in linears]
    memory = torch.cat(shards).to(dtype)
    for linear, shard in zip(linears, memory.split([len(shard) for shard in shards]), strict=True):
        linear.weight = nn.Parameter(shard)
        linear.weight.grad_dtype = torch.float32


def run_layers(part: Llama, x_BTC: Tensor, dy_BTC: Tensor, mesh: Mesh) -> LayersResult:
    """Run this rank's tokens of full sequences through the layers, forward and backward."""
    x_BTC, dy_BTC = (_tokens(x, mesh) for x in (x_BTC, dy_BTC))
    x_BTC.requires_grad_()
    out_BTC = part.run_layers(x_BTC)
    out_BTC.backward(dy_BTC)
    assert x_BTC.grad is not None
    named = part.layers.named_parameters()
    return LayersResult(out_BTC.detach(), x_BTC.grad, {name: p.grad for name, p in named if p.grad is not None})


def _tokens(x_BTC: Tensor, mesh: Mesh) -> Tensor:
    cp, chunks = mesh.size("cp"), x_BTC.chunk(2 * mesh.size("cp"), dim=1)
    x_BTC = torch.cat([chunks[index] for index in chunk_indices(mesh.index("cp"), cp)], dim=1)
    return x_BTC.chunk(mesh.size("tp"), dim=1)[mesh.index("tp")].clone()


def full_result(ranks: list[LayersResult], parallel: Parallel) -> LayersResult:
    """Return what one rank would have computed, given the results of (cp, tp) ranks."""
    tp, cp = parallel.tp, parallel.cp
    by_cp = [ranks[first : first + tp] for first in range(0, cp * tp, tp)]

    def sequences(name: str) -> Tensor:
        chunks: dict[int, Tensor] = {}
        for index, shards in enumerate(by_cp):
            x_BTC = torch.cat([getattr(shard, name) for shard in shards], dim=1)
            chunks |= dict(zip(chunk_indices(index, cp), x_BTC.chunk(2, dim=1), strict=True))
        return torch.cat([chunks[index] for index in sorted(chunks)], dim=1)

    def gradient(name: str) -> Tensor:
        sums = [torch.stack([shards[rank].grads[name] for shards in by_cp]).sum(0) for rank in range(tp)]
        if "norm" in name:
            return torch.stack(sums).sum(0)
        return torch.cat(sums, dim=0 if name.split(".")[-2] in ROWS else 1)

    return LayersResult(sequences("out_BTC"), sequences("dx_BTC"), {name: gradient(name) for name in ranks[0].grads})
