"""Buckets: matrices that are gathered, reduced and updated together, as views of one flat buffer.

    bucket = Bucket(unallocated, replicas, formats, device, resident=False)
    bucket.parameters                                      # views of the buffer
    bucket.gather()                                        # all-gather: the parameters have their values
    bucket.free()                                          # until the next gather they have no memory
    bucket.reduce()                                        # reduce-scatter of the gradients into `grad_shard`

The replicas of a bucket own equal slices of it, the shards: the optimizer updates `shard`, completed by `low` to fp32
(`llmb/ops/optim/adam.py`), and its state has the same shape. A collective reads and writes the buffer itself, without
copies. Consecutive matrices of one width are contiguous, so that a GEMM can take several as one (`merged_view`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from llmb.ops.optim.adam import join_master_weight, split_master_weight
from llmb.perfmodel.shards import bucket_layout
from llmb.runtime.flat_collectives import all_gather_flat, reduce_scatter_flat
from llmb.train.parallel.mesh import Replicas
from llmb.train.parallel.parameter_shard import ParameterShard, box_of, boxes_of_range, shard_of


class BucketFormats(NamedTuple):
    """Number formats of weights and gradients."""

    weights: torch.dtype  # that GEMMs read
    has_low_bits: bool  # bf16 weights are the high halves of fp32 ones
    gradients: torch.dtype
    reduced: torch.dtype  # in which gradients are summed over replicas


class BucketParameter(nn.Parameter):
    """Parameter in a bucket; the first gradient of a step is written into memory of the bucket."""

    _bucket: "ReferenceType[Bucket]"  # weak: a bucket refers to its parameters
    shard: ParameterShard
    number: int

    @property
    def bucket(self) -> "Bucket":
        """The bucket, which a model part keeps alive."""
        bucket = self._bucket()
        assert bucket is not None
        return bucket

    @property
    def main_grad(self) -> Tensor:
        """Memory for the gradient."""
        return self.bucket.grad_view(self.number)


class Bucket:
    """Matrices of an FSDP unit that the same ranks hold."""

    def __init__(
        self,
        unallocated: Mapping[str, nn.Parameter],
        replicas: Replicas,
        formats: BucketFormats,
        device: torch.device,
        resident: bool,
    ):
        """Allocate the weights; resident ones always have memory."""
        self.names, self.replicas, self.formats = [*unallocated], replicas, formats
        self.sizes = [tuple(parameter.shape) for parameter in unallocated.values()]
        self.offsets, self.shard_size = bucket_layout(self.sizes, replicas.ranks)
        self.grads: Tensor | None = None  # of all parameters, while they accumulate
        self.grad_shard: Tensor | None = None  # this rank's slice of the sum over replicas
        size = self.shard_size
        self.flat = torch.zeros(size * replicas.ranks, dtype=formats.weights, device=device)
        self.resident = resident or not self.is_sharded
        own_slice = self.flat[replicas.position * size :][:size]
        self.shard = own_slice if self.resident else torch.zeros_like(own_slice)
        self.low = torch.zeros(size, dtype=torch.int16, device=device) if formats.has_low_bits else None
        self.parameters: list[BucketParameter] = []
        for number, parameter in enumerate(unallocated.values()):
            # Not detach(), which shares the version counter: autograd must not see a gather as a change.
            view = BucketParameter(self._view(self.flat.data, number))
            view._bucket, view.number, view.shard = ReferenceType(self), number, shard_of(parameter)
            view.grad_dtype = formats.gradients
            self.parameters.append(view)
        self.gathered = not self.is_sharded
        self.free()

    @property
    def is_sharded(self) -> bool:
        """Whether there are replicas to communicate with."""
        return self.replicas.group is not None

    def _view(self, flat: Tensor, number: int) -> Tensor:
        sizes, offset = self.sizes[number], self.offsets[number]
        return flat[offset : offset + torch.Size(sizes).numel()].view(sizes)

    def own_range(self, number: int) -> tuple[int, int]:
        """Return the range of a parameter's elements that are in this rank's shard; empty if start >= stop."""
        offset, begin = self.offsets[number], self.replicas.position * self.shard_size
        count = torch.Size(self.sizes[number]).numel()
        return max(begin - offset, 0), min(begin + self.shard_size - offset, count)

    def own_part(self, flat: Tensor, number: int) -> Tensor:
        """Return the elements of a parameter in a tensor of the shard's shape."""
        start, stop = self.own_range(number)
        begin = self.offsets[number] - self.replicas.position * self.shard_size
        return flat[begin + start : begin + stop] if start < stop else flat[:0]

    def own_boxes(self, flat: Tensor, number: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield the same elements as boxes of the whole parameter: offset and values."""
        part, begin = self.own_part(flat, number), 0
        for offset, sizes in boxes_of_range(self.sizes[number], *self.own_range(number)):
            count = torch.Size(sizes).numel()
            origin = self.parameters[number].shard.offset
            yield tuple(map(sum, zip(offset, origin, strict=True))), part[begin : begin + count].view(sizes)
            begin += count

    # Weights

    @torch.no_grad()
    def gather(self) -> None:
        """All-gather the weights, unless they are here already."""
        if self.gathered:
            return
        self.allocate_gathered()
        all_gather_flat(self.flat, self.shard, group=self.replicas.group)
        self.gathered = True

    def allocate_gathered(self) -> None:
        """Allocate memory to gather into."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat.nbytes)

    def free(self) -> None:
        """Free the memory of gathered weights."""
        if not self.resident and self.flat.untyped_storage().nbytes():
            self.flat.untyped_storage().resize_(0)
            self.gathered = False

    def invalidate(self) -> None:
        """Declare the gathered weights outdated, because the optimizer has updated the shards."""
        self.gathered = not self.is_sharded

    @torch.no_grad()
    def set_weight(self, number: int, whole: Tensor) -> None:
        """Copy this rank's part of a whole weight, in fp32, into the shard."""
        shard, sizes = self.parameters[number].shard, self.sizes[number]
        start, stop = self.own_range(number)
        if start < stop:
            self.set_own_part(number, box_of(whole, shard, sizes).flatten()[start:stop])

    @torch.no_grad()
    def set_own_part(self, number: int, values: Tensor) -> None:
        """Set the elements of a weight that are in this rank's shard, given in fp32."""
        high = self.own_part(self.shard, number)
        if self.low is None:
            high.copy_(values)
        else:
            split_master_weight(values.to(high.device), high, self.own_part(self.low, number))

    def master_weights(self) -> Tensor:
        """Return the shard's weights in fp32."""
        return self.shard.float() if self.low is None else join_master_weight(self.shard, self.low)

    # Gradients

    def grad_view(self, number: int) -> Tensor:
        """Return the memory of a parameter's gradient."""
        if self.grads is None:
            self.grads = torch.empty_like(self.flat, dtype=self.formats.gradients)
            for offset, following, sizes in zip(
                self.offsets, [*self.offsets[1:], len(self.grads)], self.sizes, strict=True
            ):
                if (end := offset + torch.Size(sizes).numel()) < following:
                    self.grads[end:following] = 0.0
        return self._view(self.grads, number)

    @torch.no_grad()
    def reduce(self) -> tuple[Tensor, ...]:
        """Add the gradients' sum over replicas to `grad_shard`; return memory that must stay until it is done."""
        for number, parameter in enumerate(self.parameters):
            memory = self.grad_view(number)
            if parameter.grad is None:
                memory.zero_()
            elif parameter.grad.untyped_storage()._cdata != memory.untyped_storage()._cdata:
                memory.copy_(parameter.grad)
        grads, self.grads = self.grads, None
        assert grads is not None
        for parameter in self.parameters:
            parameter.grad = None
        if not self.is_sharded:
            self.grad_shard = grads
            return ()
        summands = grads.to(self.formats.reduced)
        total = torch.empty(self.shard_size, dtype=summands.dtype, device=grads.device)
        reduce_scatter_flat(total, summands, group=self.replicas.group)
        total = total.to(self.formats.gradients)
        self.grad_shard = total if self.grad_shard is None else self.grad_shard.add_(total)
        return grads, summands

    @property
    def reduced_grad(self) -> Tensor:
        """This rank's slice of the gradients' sum, after the step's last reduction."""
        assert self.grad_shard is not None
        return self.grad_shard


def merged_view(matrices: Sequence[Tensor]) -> Tensor:
    """Return one matrix over row blocks that are contiguous in memory."""
    first, offset = matrices[0], matrices[0].storage_offset()
    for matrix in matrices:
        assert matrix.untyped_storage()._cdata == first.untyped_storage()._cdata
        assert matrix.storage_offset() == offset, "matrices that are not contiguous in memory"
        assert matrix.is_contiguous()
        offset += matrix.numel()
    rows, width = sum(map(len, matrices)), first.shape[1]
    return first.as_strided((rows, width), (width, 1), first.storage_offset())
