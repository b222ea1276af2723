"""Tensors of which a rank has some boxes, for torch.distributed.checkpoint.

    tensor = ChunkedTensor(shape, dtype, [(offset, values), ...])

Tensor names and shapes in a checkpoint do not depend on the layout: a rank writes its boxes and reads those of any
other layout. torch calls the three methods below; DTensor implements the same protocol.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from llmb.train.parallel.bucket import Bucket
from llmb.train.parallel.parameter_shard import shard_of

Chunk = tuple[tuple[int, ...], Tensor]  # offset and values


class ChunkedTensor(Tensor):
    """Boxes of a tensor; the tensor itself has no memory."""

    chunks: list[Chunk]

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[Chunk]) -> "ChunkedTensor":
        tensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        tensor.chunks = [*chunks]
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ChunkedTensor({[*self.shape]}, {len(self.chunks)} chunks)"

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_args: Any) -> Any:
        raise NotImplementedError(f"{function} of a ChunkedTensor: only its chunks have values")

    def __create_write_items__(self, name: str, _tensor: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), values.shape) for offset, values in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(values for offset, values in self.chunks if torch.Size(offset) == index.offset)


def bucket_tensors(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, ChunkedTensor]]:
    """Yield the tensor of each parameter, given the values of a bucket's shard."""
    for number, (name, parameter) in enumerate(zip(bucket.names, bucket.parameters, strict=True)):
        yield name, ChunkedTensor(parameter.shard.shape, flat.dtype, [*bucket.own_boxes(flat, number)])


def replicated_tensor(parameter: nn.Parameter, values: Tensor) -> ChunkedTensor:
    """Return the tensor of a replicated parameter."""
    shard = shard_of(parameter)
    return ChunkedTensor(shard.shape, values.dtype, [(shard.offset, values)])


def chunk_values(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the values of a tensor that this rank has."""
    if isinstance(tensor, ChunkedTensor):
        yield from (values for _, values in tensor.chunks)
    else:
        yield tensor


def with_chunk_values(tensor: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Return the tensor with other values in the same places."""
    if not isinstance(tensor, ChunkedTensor):
        return values[0]
    offsets = (offset for offset, _ in tensor.chunks)
    return ChunkedTensor(tensor.shape, tensor.dtype, [*zip(offsets, values, strict=True)])
