"""Collectives on activations along one device mesh dimension, differentiable.

What the forward pass gathers, the backward pass reduces: each rank that used the full tensor has a partial gradient.

These are autograd functions around one collective each, not DTensor's redistribution: that costs the host about 0.6 ms
a call, four times in a block, and a rank of many narrow layers then waits for its host.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from llmb.train.parallel.sequence_parallel import SequenceParallel


def all_gather(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Concatenate all ranks' shards along a dimension; the backward pass is a reduce-scatter."""
    gathered: Tensor = _SequenceCollective.apply(x, mesh.get_group(), dim, True)
    return gathered


def reduce_scatter(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's shard, along a dimension, of the sum over ranks; the backward pass is an all-gather."""
    scattered: Tensor = _SequenceCollective.apply(x, mesh.get_group(), dim, False)
    return scattered


def all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum over ranks, all of which then compute the same; the backward pass is the identity."""
    total: Tensor = _AllReduce.apply(x, mesh.get_group())
    return total


class _SequenceCollective(torch.autograd.Function):
    """All-gather, or reduce-scatter, along one dimension; backward is the other of the two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, gathers: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.gathers = group, dim, gathers
        return _collect(x, group, dim, gathers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _collect(grad, ctx.group, ctx.dim, not ctx.gathers), None, None, None


def _collect(x: Tensor, group: ProcessGroup, dim: int, gathers: bool) -> Tensor:
    """Run the collective with the dimensions before `dim` as sequences."""
    tp = SequenceParallel(group, x.shape[:dim].numel())
    rows = (tp.gather if gathers else tp.reduce_scatter)(x.flatten(0, dim))
    return rows.unflatten(0, (*x.shape[:dim], -1))


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
