"""Dtype and memory layout that ops ask of their arguments."""

from collections.abc import Sequence

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 if it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dense_rows(x: Tensor) -> Tensor:
    """Return x with the last dimension contiguous, copied only if it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """Return x as a matrix of rows, copied only if channels are not contiguous."""
    return dense_rows(x if x.ndim == 2 else x.flatten(0, -2))


def merge_columns(matrices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return one matrix over columns that are side by side in the rows of a wider one, or else the matrices."""
    first, width = matrices[0], 0
    for matrix in matrices:
        is_beside = (
            matrix.untyped_storage()._cdata == first.untyped_storage()._cdata
            and matrix.storage_offset() == first.storage_offset() + width
            and (matrix.dtype, len(matrix), matrix.stride()) == (first.dtype, len(first), first.stride())
        )
        if not is_beside:
            return tuple(matrices)
        width += matrix.shape[1]
    if first.stride(1) != 1 or first.stride(0) < width:
        return tuple(matrices)
    return (first.as_strided((len(first), width), first.stride()),)
