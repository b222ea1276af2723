"""Collectives of tensor parallelism with sequence parallelism, without autograd: for layers with explicit backward.

    tp = SequenceParallel(group, sequences=2)
    x_NC = tp.gather(x_SC)                          # all tokens of each sequence, from every rank's part of it
    x_SC = tp.reduce_scatter(partial_NC)

Every sequence has a collective of its own, straight into its rows: one collective would need a copy to bring the rows
of all ranks into the order of the sequences.

Shapes: N tokens of all ranks, S of this one, C channels.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from llmb.runtime.flat_collectives import all_gather_flat, reduce_scatter_flat


class SequenceParallel:
    """Implements `llmb.models.llama_layer.layer_collectives.TensorParallel`."""

    def __init__(self, group: ProcessGroup, sequences: int):
        self.sequences, self.ranks, self._group = sequences, group.size(), group

    def gather(self, x_SC: Tensor) -> Tensor:
        """Return the rows of all ranks, sequence after sequence."""
        x = x_SC.contiguous()
        out_NC = x.new_empty(self.ranks * len(x), *x.shape[1:])
        for part, rows in zip(self._bytes(x), self._bytes(out_NC), strict=True):
            all_gather_flat(rows, part, group=self._group)
        return out_NC

    def reduce_scatter(self, partial_NC: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks."""
        out_SC = partial_NC.new_empty(len(partial_NC) // self.ranks, *partial_NC.shape[1:])
        partials = partial_NC.contiguous().chunk(self.sequences)
        for rows, part in zip(partials, out_SC.chunk(self.sequences), strict=True):
            reduce_scatter_flat(part, rows, group=self._group)
        return out_SC

    def _bytes(self, x_SC: Tensor) -> tuple[Tensor, ...]:
        """Split into sequences; fp8, which not every backend takes, as bytes."""
        return (x_SC.view(torch.uint8) if x_SC.element_size() == 1 else x_SC).chunk(self.sequences)
