"""Bias of queries, keys and values, and the RMSNorm of queries and keys, in serving: one pass over the projections.

    qkv_norm_(qkv_NW, heads, kv_heads, bias_W, (q_norm_D, k_norm_D), eps)

A norm has the weights of one head, and each head its own mean square (Qwen3, Gemma 3), or those of all heads (OLMo 2).

Shapes: N tokens, W the width of queries, keys and values side by side, D head dimension.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.norm.rms_norm import rms_norm
from llmb.ops.tensor_layout import at_least_fp32


@op
def qkv_norm_(
    qkv_NW: Tensor,
    heads: int,
    kv_heads: int,
    bias_W: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Add `bias` to qkv, and norm queries and keys with the weights of `norms`, in place; rounded once."""
    x = at_least_fp32(qkv_NW) if bias_W is None else at_least_fp32(qkv_NW) + at_least_fp32(bias_W)
    if norms is None:
        qkv_NW.copy_(x)
        return
    head_dim = qkv_NW.shape[1] // (heads + 2 * kv_heads)
    q, k, v = x.split([count * head_dim for count in (heads, kv_heads, kv_heads)], dim=1)
    normed = (
        rms_norm.reference(rows.reshape(-1, len(weight)), weight, eps).view(rows.shape)
        for rows, weight in zip((q, k), norms, strict=True)
    )
    qkv_NW.copy_(torch.cat((*normed, v), dim=1))
