"""Causal attention with logit softcap: softmax(softcap * tanh(scale * q k / softcap)) v.

torch's fused attention has no softcap. On CUDA, in bf16, Triton kernels compute it; elsewhere plain matmuls run over a
chunk of queries at a time, each recomputed in the backward pass, so that only one chunk's logits exist.

Queries may be fewer than keys: they are then the last, and the last one sees all keys. With a sliding window a query
sees at most the last `window` of its keys.

Shapes: B sequences, H heads, Q queries, T keys, D head_dim. k and v may have fewer heads, each serving a group of q's.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llmb.ops.attention.attention_metadata import causal_mask
from llmb.ops.dispatch import is_dry_run, op

QUERY_CHUNK = 512  # 0.8 GB of fp32 logits with 48 heads and 8,192 keys
KERNEL_HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_SOFTCAP = 60.0  # of the kernels, which say why


def kernel_supports(
    q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, softcap: float, _window: int | None = None
) -> bool:
    """Return whether the Triton kernels take these arguments; a dry run always takes their place."""
    return is_dry_run() or (v_BHTD.shape[-1] == q_BHQD.shape[-1] and kernel_takes_heads(q_BHQD, softcap))


def kernel_takes_heads(q: Tensor, softcap: float) -> bool:
    """Return whether the Triton kernels take heads of this width and dtype, and the softcap."""
    return q.shape[-1] in KERNEL_HEAD_DIMS and q.dtype == torch.bfloat16 and softcap <= MAX_SOFTCAP


@op(when=kernel_supports)
def softcap_attention(
    q_BHQD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    scale: float,
    softcap: float,
    window: int | None = None,
    chunk: int = QUERY_CHUNK,
) -> Tensor:
    """Return the attention, by plain matmuls over a chunk of queries at a time; the softmax is in fp32."""
    group, queries = q_BHQD.shape[1] // k_BHTD.shape[1], q_BHQD.shape[2]
    context = k_BHTD.shape[2] - queries  # keys that every query sees
    k_BHTD, v_BHTD = (x.repeat_interleave(group, dim=1) for x in (k_BHTD, v_BHTD))
    outputs = []
    for start in range(0, queries, chunk):
        end = min(start + chunk, queries)
        keys = slice(0 if window is None else max(0, context + start - window + 1), context + end)
        operands = q_BHQD[:, :, start:end], k_BHTD[:, :, keys], v_BHTD[:, :, keys]
        outputs.append(
            checkpoint(_attend_chunk, *operands, scale, softcap, window, use_reentrant=False, preserve_rng_state=False)
        )
    return torch.cat(outputs, dim=2)


def _attend_chunk(
    q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, softcap: float, window: int | None
) -> Tensor:
    """Attend with the last queries of all keys."""
    logits_BHQT = softcap * torch.tanh((q_BHQD @ k_BHTD.mT).float() * (scale / softcap))
    mask_QT = causal_mask(q_BHQD.shape[2], k_BHTD.shape[2], q_BHQD.device, window)
    probs_BHQT = logits_BHQT.masked_fill(~mask_QT, float("-inf")).softmax(dim=-1)
    return probs_BHQT.to(v_BHTD.dtype) @ v_BHTD
