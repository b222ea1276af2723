"""A linear layer for a handful of tokens: bound by reading the weight, which 8-bit weights halve.

    out_NO = thin_product(x, weight_OK, scales_O, dtype)      # x plain or Rows8; scales only beside 8-bit weights

Tensor cores have nothing to do here. On a GPU a program sums a few rows of the weight; it starts reading them while the
kernel before it is still at work (`dependent_launch.py`), which hides the pauses between small kernels.

Shapes: N tokens, K inputs, O outputs.
"""

import torch
from torch import Tensor

from llmb.kernels.forms import Rows8, as_plain
from llmb.kernels.triton_device import takes_triton

MOST_TOKENS = 4  # beyond these a product on tensor cores is faster


def thin_product_reference(x: Tensor | Rows8, weight_OK: Tensor, scales_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """In fp32, in plain torch."""
    out_NO = as_plain(x, torch.float32) @ weight_OK.float().T
    return (out_NO if scales_O is None else out_NO * scales_O).to(dtype)


def thin_product(x: Tensor | Rows8, weight_OK: Tensor, scales_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same in one kernel where there is one."""
    if takes_triton(weight_OK):
        from llmb.kernels.thin_triton import thin_product_triton

        return thin_product_triton(x, weight_OK, scales_O, dtype)
    return thin_product_reference(x, weight_OK, scales_O, dtype)


def is_thin(x_NK: Tensor) -> bool:
    """Whether a layer should be computed this way."""
    return x_NK.is_cuda and 0 < len(x_NK) <= MOST_TOKENS and x_NK.dtype is not torch.float32
