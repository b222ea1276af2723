"""The norm before a block, there and back: each row scaled to unit root mean square, each channel by its weight.

    normed_NC = rms_norm(x_NC, weight_C, eps)
    rms_norm_backward(dnormed_NC, x_NC, weight_C, eps, dresidual_NC, out_NC, dweight_C, fresh=True)

The way back also adds the slope that went around the block, so that it reads and writes memory once. Both compute in
fp32 and round once; nothing but the input is kept between them. Shapes: N rows, of any stride, and C channels.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def rms_norm(x_NC: Tensor, weight_C: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """weight * x / rms(x), in the format of x, or written to `out`, which may be x."""
    out_NC = torch.empty(x_NC.shape, dtype=x_NC.dtype, device=x_NC.device) if out is None else out
    if takes_triton(x_NC):
        from llmb.ops.norm.rms_norm_triton import rms_norm_triton

        rms_norm_triton(x_NC, weight_C, eps, out_NC)
    else:
        rms_norm_reference(x_NC, weight_C, eps, out_NC)
    return out_NC


def rms_norm_reference(x_NC: Tensor, weight_C: Tensor, eps: float, out_NC: Tensor) -> None:
    """The same in plain torch."""
    x, weight = _wide(x_NC), _wide(weight_C)
    out_NC.copy_(x * _inverse_size(x, eps) * weight)


def rms_norm_backward(
    dy_NC: Tensor,
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    dresidual_NC: Tensor | None,
    out_NC: Tensor,
    dweight_C: Tensor,
    fresh: bool,
) -> None:
    """`out` becomes dresidual (None: nothing) + the slope of x; it may be dresidual or dy. `dweight` is set if fresh,
    otherwise added to; its sum over rows has a fixed order, so the same call gives the same bits."""
    if takes_triton(x_NC):
        from llmb.ops.norm.rms_norm_triton import rms_norm_backward_triton

        rms_norm_backward_triton(dy_NC, x_NC, weight_C, eps, dresidual_NC, out_NC, dweight_C, fresh)
    else:
        rms_norm_backward_reference(dy_NC, x_NC, weight_C, eps, dresidual_NC, out_NC, dweight_C, fresh)


def rms_norm_backward_reference(
    dy_NC: Tensor,
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    dresidual_NC: Tensor | None,
    out_NC: Tensor,
    dweight_C: Tensor,
    fresh: bool,
) -> None:
    """The same in plain torch."""
    dy, x, weight = _wide(dy_NC), _wide(x_NC), _wide(weight_C)
    inverse = _inverse_size(x, eps)
    normed, dnormed = x * inverse, dy * weight
    dx = inverse * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    dweight = (dy * normed).sum(0)
    out_NC.copy_(dx if dresidual_NC is None else _wide(dresidual_NC) + dx)
    dweight_C.copy_(dweight if fresh else _wide(dweight_C) + dweight)


def _inverse_size(x_NC: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x_NC.square().mean(-1, keepdim=True) + eps)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
