"""Dtype and memory layout that ops ask of their arguments."""

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
