"""The part of a parameter that this rank has: a box of the whole tensor, cut by tp, ep and etp.

    mark_shard(parameter, shape, offset, replicas)      # by the pass that cuts it, on the meta device
    shard_of(parameter)                                 # of an unmarked parameter: the whole of it

FSDP shards what is left once more, over the ranks that hold the same part (`replicas`).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmb.train.parallel.mesh import REPLICAS

Offset = tuple[int, ...]
Sizes = tuple[int, ...]


class ParameterShard(NamedTuple):
    """A box of the whole parameter, and the mesh dimension of the ranks that hold the same box."""

    shape: Sizes  # of the whole parameter
    offset: Offset  # of the box
    replicas: str = REPLICAS


def mark_shard(parameter: nn.Parameter, shape: Sequence[int], offset: Sequence[int], replicas: str) -> nn.Parameter:
    """Record which box of the whole parameter this is."""
    parameter.shard = ParameterShard(tuple(shape), tuple(offset), replicas)  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: nn.Parameter) -> ParameterShard:
    """Return the recorded box."""
    whole = ParameterShard(tuple(parameter.shape), (0,) * parameter.ndim)
    return getattr(parameter, "shard", whole)


def local_parameter(whole: nn.Parameter, cuts: Sequence[tuple[int, int, int]], replicas: str) -> nn.Parameter:
    """Return an unallocated parameter of this rank's box; a cut is a dimension, this rank's index and the ranks."""
    sizes, offset = list(whole.shape), [0] * whole.ndim
    for dim, index, ranks in cuts:
        sizes[dim] //= ranks
        offset[dim] = index * sizes[dim]
    local = nn.Parameter(torch.empty(sizes, dtype=whole.dtype, device="meta"))
    return mark_shard(local, whole.shape, offset, replicas)


def box_of(whole: Tensor, shard: ParameterShard, sizes: Sequence[int]) -> Tensor:
    """Return this rank's box, of these sizes, of a whole tensor."""
    return whole[tuple(slice(start, start + size) for start, size in zip(shard.offset, sizes, strict=True))]


def boxes_of_range(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[Offset, Sizes]]:
    """Yield offset and sizes of boxes that are the elements [start, stop) of a contiguous tensor, in order."""
    if start >= stop:
        return
    if len(sizes) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _boxes_of_row(sizes, last, start, stop)
        return
    yield from _boxes_of_row(sizes, first - 1, start, first * row)
    if first < last:
        yield (first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:])
    yield from _boxes_of_row(sizes, last, last * row, stop)


def _boxes_of_row(sizes: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[Offset, Sizes]]:
    begin = index * math.prod(sizes[1:])
    for offset, box in boxes_of_range(sizes[1:], start - begin, stop - begin):
        yield (index, *offset), (1, *box)
