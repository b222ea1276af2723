"""Linear layers for a handful of tokens with norm, gated activation and residual fused: bound by reading the weight.

    out_NO = skinny_gemm(x, SkinnyGemmWeight(values_OK, scales_O), dtype)             # x plain or PerTokenFp8
    qkv_NO = skinny_gemm(residual_NC, qkv, dtype, norm=InputNorm(weight_C, eps))
    act_NF = skinny_gemm(residual_NC, gate_up, dtype, norm=norm, activation="silu")   # [N, O/2]
    residual_NC = skinny_gemm(act_NF, down, dtype, addend_NO=residual_NC)

Tensor cores have nothing to do here. On a GPU a program reduces a few rows of the weight; it starts loading them while
the previous kernel is still running (`dependent_launch.py`), which hides the gaps between small kernels. A norm costs
next to nothing, because the factor that it applies to all channels of a token may as well multiply the sum.

fp8 weights meet unquantized activations: quantizing those saves no time here, and without it the result is more exact
than that of the GEMM for many tokens. Nothing is rounded between norm, GEMM and addition, which are in fp32.

Shapes: N tokens, K inputs, O outputs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.activation.activation import ACTIVATIONS
from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import PerTokenFp8, dequantize

MAX_TOKENS = 2  # with 4 a GEMM on tensor cores takes half the time


class SkinnyGemmWeight(NamedTuple):
    """A weight; fp8 values have a scale for each output."""

    values_OK: Tensor
    scales_O: Tensor | None = None


class InputNorm(NamedTuple):
    """RMSNorm of the inputs."""

    weight_K: Tensor
    eps: float


@op
def skinny_gemm(
    x: Tensor | PerTokenFp8,
    weight: SkinnyGemmWeight,
    dtype: torch.dtype,
    norm: InputNorm | None = None,
    activation: str | None = None,
    addend_NO: Tensor | None = None,
) -> Tensor:
    """Return norm(x) @ weight.T plus `addend`, computed in fp32.

    With an activation the first half of the weight's rows is the gate, the second half up.
    """
    x_NK = dequantize(x, torch.float32)
    if norm is not None:
        x_NK = F.rms_norm(x_NK, norm.weight_K.shape, norm.weight_K.float(), norm.eps)
    out_NO = x_NK @ weight.values_OK.float().T
    if weight.scales_O is not None:
        out_NO = out_NO * weight.scales_O
    if activation is not None:
        gate_NF, up_NF = out_NO.chunk(2, dim=-1)
        out_NO = ACTIVATIONS[activation](gate_NF) * up_NF
    return (out_NO if addend_NO is None else out_NO + addend_NO).to(dtype)


def takes_skinny_gemm(x_NK: Tensor) -> bool:
    """Return whether linear layers of these activations should be computed by `skinny_gemm`."""
    return x_NK.is_cuda and 0 < len(x_NK) <= MAX_TOKENS and x_NK.dtype is not torch.float32
