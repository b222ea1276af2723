"""Where Triton kernels run: the one place that decides between them and plain torch."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def triton_installed() -> bool:
    """Looked up without importing it: a machine without a GPU need not have it."""
    return find_spec("triton") is not None


def takes_triton(tensor: Tensor) -> bool:
    """Whether this tensor is where a Triton kernel can work on it."""
    return tensor.is_cuda and triton_installed()
