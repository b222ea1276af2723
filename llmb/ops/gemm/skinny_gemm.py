"""A linear layer for a handful of tokens, with what stands before and after it: bound by reading the weight.

    out_NO = thin_product(x, ThinWeight(values_OK, scales_O), dtype)         # x plain or Rows8
    qkv_NO = thin_product(stream_NC, qkv, dtype, norm=Norm(weight_C, eps))   # of the normed stream
    mixed_NF = thin_product(stream_NC, both, dtype, norm=norm, activation="silu")  # gate and up in one: gated, [N, O/2]
    stream_NC = thin_product(mixed_NF, down, dtype, onto_NO=stream_NC)       # added to the stream

Tensor cores have nothing to do here. On a GPU a program sums a few rows of the weight; it starts reading them while the
kernel before it is still at work (`dependent_launch.py`), which hides the pauses between small kernels. A norm costs it
next to nothing, because the factor that a norm gives all channels of a token may as well multiply the sum.

8-bit weights meet activations as they are: rounding those saves no time here, and without it the product is more exact
than the one for many tokens. Nor is anything rounded between norm, product and sum, which are in fp32.

Shapes: N tokens, K inputs, O outputs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.activation.gated_act import ACTIVATIONS
from llmb.ops.dispatch import takes_triton
from llmb.ops.quant.activation_quant import Rows8, as_plain

MOST_TOKENS = 4  # beyond these a product on tensor cores is faster


class ThinWeight(NamedTuple):
    """A weight, and beside 8-bit values a scale for each output."""

    values_OK: Tensor
    scales_O: Tensor | None = None


class Norm(NamedTuple):
    """A root-mean-square norm of the inputs."""

    weight_K: Tensor
    eps: float


def thin_product_reference(
    x: Tensor | Rows8,
    weight: ThinWeight,
    dtype: torch.dtype,
    norm: Norm | None = None,
    activation: str | None = None,
    onto_NO: Tensor | None = None,
) -> Tensor:
    """In fp32, in plain torch."""
    x_NK = as_plain(x, torch.float32)
    if norm is not None:
        x_NK = F.rms_norm(x_NK, norm.weight_K.shape, norm.weight_K.float(), norm.eps)
    out_NO = x_NK @ weight.values_OK.float().T
    if weight.scales_O is not None:
        out_NO = out_NO * weight.scales_O
    if activation is not None:
        gate_NF, up_NF = out_NO.chunk(2, dim=-1)
        out_NO = ACTIVATIONS[activation](gate_NF) * up_NF
    return (out_NO if onto_NO is None else out_NO + onto_NO).to(dtype)


def thin_product(
    x: Tensor | Rows8,
    weight: ThinWeight,
    dtype: torch.dtype,
    norm: Norm | None = None,
    activation: str | None = None,
    onto_NO: Tensor | None = None,
) -> Tensor:
    """The same in one kernel where there is one. With an activation the first half of the outputs is its gate."""
    if takes_triton(weight.values_OK):
        from llmb.ops.gemm.skinny_gemm_triton import thin_product_triton

        return thin_product_triton(x, weight, dtype, norm, activation, onto_NO)
    return thin_product_reference(x, weight, dtype, norm, activation, onto_NO)


def is_thin(x_NK: Tensor) -> bool:
    """Whether layers should be computed this way."""
    return x_NK.is_cuda and 0 < len(x_NK) <= MOST_TOKENS and x_NK.dtype is not torch.float32
