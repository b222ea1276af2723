"""How tensors must lie for kernels that step over them by their strides."""

from torch import Tensor


def dense_rows(x: Tensor) -> Tensor:
    """The same with the values of its last axis side by side: copied only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()
