"""Causal attention of whole sequences with a sliding window: a token attends to itself and `window` - 1 before it.

    out_BHTD = window_attention(q_BHTD, k_BHTD, v_BHTD, scale, window)        # differentiable

torch's fused attention takes a window as a mask only, which costs as much as no window. Here the kernels of
`attention_block.py` skip the keys outside: FlashAttention on a GPU, plain torch elsewhere.

Shapes: B sequences, H heads, T tokens, D head_dim. k and v may have fewer heads, each serving a group of q's.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.attention.segment_attention import Segment, windowed_backward, windowed_forward


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, window: int) -> Tensor:
        sequences, tokens = len(q_BHTD), q_BHTD.shape[2]
        q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q_BHTD, k_BHTD, v_BHTD))
        ctx.segments = tuple(Segment(n * tokens, (n + 1) * tokens, 0, 0) for n in range(sequences))
        out_NHD, lse_HN = windowed_forward(q, k, v, k[:0], v[:0], ctx.segments, scale, window)
        ctx.save_for_backward(q, k, v, out_NHD, lse_HN)
        ctx.scale, ctx.window = scale, window
        return out_NHD.unflatten(0, (sequences, tokens)).transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out_NHD, lse_HN = ctx.saved_tensors
        dout_NHD = dout_BHTD.transpose(1, 2).flatten(0, 1).contiguous()
        grads = windowed_backward(
            dout_NHD, q, k, v, k[:0], v[:0], out_NHD, lse_HN, ctx.segments, k[:0], v[:0], ctx.scale, ctx.window
        )
        unpacked = (x.unflatten(0, (len(ctx.segments), -1)).transpose(1, 2).to(q.dtype) for x in grads)
        return *unpacked, None, None


def window_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, window: int) -> Tensor:
    """Return the attention of all tokens."""
    return _WindowAttention.apply(q_BHTD, k_BHTD, v_BHTD, scale, window)
