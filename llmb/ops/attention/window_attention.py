"""Causal attention of whole sequences with a sliding window, attention sinks, or both.

    out_BHTD = window_attention(q_BHTD, k_BHTD, v_BHTD, scale, window, sinks_H)       # differentiable

With a window a token attends to itself and `window` - 1 before it. torch's fused attention takes a window as a mask
only, which costs as much as no window, and no sinks. Here the kernels of `attention_block.py` skip the keys outside:
FlashAttention on a GPU, plain torch elsewhere; without a window cuDNN on Hopper. Sinks follow from the log-sum-exp
(`attention_sinks.py`).

Shapes: B sequences, H heads, T tokens, D head_dim. k and v may have fewer heads, each serving a group of q's.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.attention.attention_sinks import add_sinks_, sink_gradient
from llmb.ops.attention.segment_attention import (
    Segment,
    causal_backward,
    causal_forward,
    windowed_backward,
    windowed_forward,
)


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTD: Tensor,
        scale: float,
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        sequences, tokens = len(q_BHTD), q_BHTD.shape[2]
        q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q_BHTD, k_BHTD, v_BHTD))
        ctx.segments = tuple(Segment(n * tokens, (n + 1) * tokens, 0, 0) for n in range(sequences))
        if window is None:
            out_NHD, lse_HN = causal_forward(q, k, v, ctx.segments, scale)
        else:
            out_NHD, lse_HN = windowed_forward(q, k, v, k[:0], v[:0], ctx.segments, scale, window)
        if sinks_H is not None:
            lse_HN = add_sinks_(out_NHD, lse_HN, sinks_H)
        ctx.save_for_backward(q, k, v, out_NHD, lse_HN, sinks_H)
        ctx.scale, ctx.window = scale, window
        return out_NHD.unflatten(0, (sequences, tokens)).transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out_NHD, lse_HN, sinks_H = ctx.saved_tensors
        dout_NHD = dout_BHTD.transpose(1, 2).flatten(0, 1).contiguous()
        if ctx.window is None:
            grads = causal_backward(dout_NHD, q, k, v, out_NHD, lse_HN, ctx.segments, ctx.scale)
        else:
            grads = windowed_backward(
                dout_NHD, q, k, v, k[:0], v[:0], out_NHD, lse_HN, ctx.segments, k[:0], v[:0], ctx.scale, ctx.window
            )
        unpacked = (x.unflatten(0, (len(ctx.segments), -1)).transpose(1, 2).to(q.dtype) for x in grads)
        return *unpacked, None, None, None if sinks_H is None else sink_gradient(dout_NHD, out_NHD, lse_HN, sinks_H)


def window_attention(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, window: int | None, sinks_H: Tensor | None = None
) -> Tensor:
    """Return the attention of all tokens."""
    return _WindowAttention.apply(q_BHTD, k_BHTD, v_BHTD, scale, window, sinks_H)
