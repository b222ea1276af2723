"""Frozen weights in fp8: tensors inside a bucket, and a widened copy of those that the current tasks compute with.

    tensors = fp8_bucket_tensors(buffer, shapes, torch.bfloat16)            # matrices: ChannelFp8; vectors: Tensor
    widened = WidenedWeights(model, torch.bfloat16, device)
    widened.tensors(range(3, 4), stored)                                    # of layer 3; stored(bucket): as above

All chunks of a round pass through a layer one after another, so weights are widened once per round and direction, by
the first task that needs them. They never change: it does not matter if their bucket has moved since.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import aligned
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.channel_quant import ChannelFp8, quantize_channels_, widen_channels_
from llmb.perfmodel.offload.buffers import padded_numel, widened_numel

StoredTensor = Tensor | ChannelFp8
Shape = tuple[int, ...]


def fp8_bucket_tensors(buffer: Tensor, shapes: Sequence[Shape], dtype: torch.dtype) -> list[StoredTensor]:
    """Return the tensors of a bucket, given its bytes: matrices in fp8, then vectors in `dtype`, then all scales."""
    matrices, vectors = ([shape for shape in shapes if (len(shape) == 2) is wide] for wide in (True, False))
    position = 0

    def take(shape: Shape, dtype: torch.dtype) -> Tensor:
        nonlocal position
        size = prod(shape) * dtype.itemsize
        tensor = buffer[position : position + size].view(dtype).view(shape)
        position += aligned(prod(shape)) * dtype.itemsize
        return tensor

    values = [take(shape, E4M3) for shape in matrices]
    plain = [take(shape, dtype) for shape in vectors]
    scales = [take(shape[:1], torch.float32) for shape in matrices]
    return [*map(ChannelFp8, values, scales), *plain]


def store_rows(target: StoredTensor, rows: slice, values: Tensor) -> None:
    """Write some rows of a stored tensor, quantized on the device of the values if it is in fp8."""
    if isinstance(target, Tensor):
        target[rows].copy_(values)
    else:
        quantize_channels_(values, target.rows(rows))


class WidenedWeights:
    """Memory for one layer, or for all shards of the embedding or of the head, in the dtype of activations."""

    def __init__(self, model: Model, dtype: torch.dtype, device: torch.device):
        self._elements = torch.empty(widened_numel(model), dtype=dtype, device=device)
        self._buckets: range | None = None
        self._tensors: list[list[Tensor]] = []

    def tensors(self, buckets: range, stored: Callable[[int], list[StoredTensor]]) -> list[list[Tensor]]:
        """Return the tensors of consecutive buckets, widened now unless they are the ones of the last call."""
        if buckets != self._buckets:
            self._tensors, first = [], 0
            for bucket in buckets:
                tensors = stored(bucket)
                self._tensors.append(self._widen(tensors, first))
                first += padded_numel(tuple(_shape(tensor) for tensor in tensors))
            self._buckets = buckets
        return self._tensors

    def _widen(self, tensors: list[StoredTensor], first: int) -> list[Tensor]:
        widened = []
        for tensor in tensors:
            shape = _shape(tensor)
            out = self._elements[first : first + prod(shape)].view(shape)
            if isinstance(tensor, Tensor):
                out.copy_(tensor)
            else:
                widen_channels_(tensor.values, tensor.scales, out)
            widened.append(out)
            first += aligned(prod(shape))
        return widened


def _shape(tensor: StoredTensor) -> Shape:
    return tuple((tensor if isinstance(tensor, Tensor) else tensor.values).shape)
