"""RMSNorm, forward and backward.

    normed_NC = rms_norm(x_NC, weight_C, eps)
    rms_norm_backward(dnormed_NC, x_NC, weight_C, eps, d_residual_NC, out_NC, dweight_C, accumulate=False)

The backward also adds the gradient of the residual connection, so that it reads and writes memory once. Both compute in
fp32 and round once; only the input is saved between them. Shapes: N rows, of any stride, and C channels.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


@op
def rms_norm(
    x_NC: Tensor, weight_C: Tensor, eps: float, out: Tensor | None = None, addend_NC: Tensor | None = None
) -> Tensor:
    """Return weight * x / rms(x), plus `addend` if given, in the dtype of x, or write it to `out`, which may be x."""
    out_NC = torch.empty(x_NC.shape, dtype=x_NC.dtype, device=x_NC.device) if out is None else out
    x, weight = at_least_fp32(x_NC), at_least_fp32(weight_C)
    normed = x * _inverse_rms(x, eps) * weight
    return out_NC.copy_(normed if addend_NC is None else at_least_fp32(addend_NC) + normed)


@op
def rms_norm_backward(
    dy_NC: Tensor,
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    d_residual_NC: Tensor | None,
    out_NC: Tensor,
    dweight_C: Tensor | None,
    accumulate: bool,
) -> None:
    """Write d_residual (None: zero) + dx to `out`, which may be d_residual, dy or x, and dweight, or add to it.

    dweight is summed over rows in a fixed order: the same call gives the same bits. None: the weight is frozen.
    """
    dy, x, weight = at_least_fp32(dy_NC), at_least_fp32(x_NC), at_least_fp32(weight_C)
    inverse_rms = _inverse_rms(x, eps)
    normed, dnormed = x * inverse_rms, dy * weight
    dx = inverse_rms * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    dweight = (dy * normed).sum(0)
    out_NC.copy_(dx if d_residual_NC is None else at_least_fp32(d_residual_NC) + dx)
    if dweight_C is not None:
        dweight_C.copy_(at_least_fp32(dweight_C) + dweight if accumulate else dweight)


def _inverse_rms(x_NC: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x_NC.square().mean(-1, keepdim=True) + eps)
