"""Causal attention whose logits are squeezed to +-cap: softmax(cap * tanh(scale * q k / cap)) v.

torch's fused attention has no such squeeze. On CUDA, in bf16, Triton kernels compute it; elsewhere plain products run
over a chunk of queries at a time, each computed again in the backward pass, so that no more than one chunk's logits
exist.

Queries may be fewer than keys: they then stand at the end, and the last one sees all keys.

Shapes: B sequences, H heads, Q queries, T keys, D width of a head. k and v may have fewer heads, each serving a group
of q's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llmb.ops.dispatch import is_dry_run, takes_triton

QUERY_CHUNK = 512  # 0.8 GB of fp32 logits with 48 heads and 8,192 keys
KERNEL_WIDTHS = (16, 32, 64, 128)  # of a head
HIGHEST_CAP = 60.0  # of the kernels, which say why


def capped_attention(q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, cap: float) -> Tensor:
    """The fast way where there is one; the one place where this is decided."""
    if is_dry_run():  # as much work and memory as any fused attention
        return F.scaled_dot_product_attention(q_BHQD, k_BHTD, v_BHTD, is_causal=True, scale=scale, enable_gqa=True)
    if takes_triton(q_BHQD) and kernels_take(q_BHQD, v_BHTD, cap):
        from llmb.ops.attention.softcap_attention_triton import CappedAttention

        return CappedAttention.apply(q_BHQD, k_BHTD, v_BHTD, scale, cap)
    return capped_attention_reference(q_BHQD, k_BHTD, v_BHTD, scale, cap)


def kernels_take(q_BHQD: Tensor, v_BHTD: Tensor, cap: float) -> bool:
    width = q_BHQD.shape[-1]
    fits = width in KERNEL_WIDTHS and v_BHTD.shape[-1] == width
    return fits and q_BHQD.dtype == torch.bfloat16 and cap <= HIGHEST_CAP


def capped_attention_reference(
    q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, cap: float, chunk: int = QUERY_CHUNK
) -> Tensor:
    """Plain products, a chunk of queries at a time; the softmax is in fp32."""
    group, queries = q_BHQD.shape[1] // k_BHTD.shape[1], q_BHQD.shape[2]
    before = k_BHTD.shape[2] - queries  # keys that every query sees
    k_BHTD, v_BHTD = (x.repeat_interleave(group, dim=1) for x in (k_BHTD, v_BHTD))
    parts = []
    for start in range(0, queries, chunk):
        end = min(start + chunk, queries)
        given = q_BHQD[:, :, start:end], k_BHTD[:, :, : before + end], v_BHTD[:, :, : before + end]
        parts.append(checkpoint(_last_queries, *given, scale, cap, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, dim=2)


def _last_queries(q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, cap: float) -> Tensor:
    """Queries that stand at the end of the keys: the last one sees them all."""
    queries, keys = q_BHQD.shape[2], k_BHTD.shape[2]
    logits_BHQT = cap * torch.tanh((q_BHQD @ k_BHTD.mT).float() * (scale / cap))
    seen_QT = torch.ones(queries, keys, dtype=torch.bool, device=q_BHQD.device).tril(keys - queries)
    weights_BHQT = logits_BHQT.masked_fill(~seen_QT, float("-inf")).softmax(dim=-1)
    return weights_BHQT.to(v_BHTD.dtype) @ v_BHTD
