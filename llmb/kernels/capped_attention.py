"""Causal attention whose logits are squeezed to +-cap: softmax(cap * tanh(scale * q k / cap)) v.

torch's fused attention has no such squeeze. On CUDA flex_attention compiles one with it; where that fails, and on CPUs,
plain products run over a chunk of queries at a time, each computed again in the backward pass, so that no more than
one chunk's logits exist.

Queries may be fewer than keys: they then stand at the end, and the last one sees all keys.

Shapes: B sequences, H heads, Q queries, T keys, D width of a head. k and v may have fewer heads, each serving a group
of q's.
"""

import warnings
from collections.abc import Callable
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from llmb.kernels.triton_device import rehearsing

QUERY_CHUNK = 512  # 0.8 GB of fp32 logits with 48 heads and 8,192 keys
PROBE_TOKENS = 128


def capped_attention(q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, cap: float) -> Tensor:
    """The fast way where there is one; the one place where this is decided."""
    group = q_BHQD.shape[1] // k_BHTD.shape[1]
    if rehearsing():  # as much work and memory as any fused attention
        return F.scaled_dot_product_attention(q_BHQD, k_BHTD, v_BHTD, is_causal=True, scale=scale, enable_gqa=True)
    if q_BHQD.is_cuda and _flex_compiles(q_BHQD.device, q_BHQD.dtype, q_BHQD.shape[-1], group):
        return flex_capped_attention(_compiled_flex(), q_BHQD, k_BHTD, v_BHTD, scale, cap)
    return capped_attention_reference(q_BHQD, k_BHTD, v_BHTD, scale, cap)


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


def flex_capped_attention(
    flex: Callable[..., Tensor], q_BHQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, cap: float
) -> Tensor:
    """The same through flex_attention, plain or compiled."""
    mask = _causal_mask(q_BHQD.shape[2], k_BHTD.shape[2], q_BHQD.device)
    return flex(q_BHQD, k_BHTD, v_BHTD, score_mod=_squeeze(cap), block_mask=mask, scale=scale, enable_gqa=True)


@cache  # one function for each cap: a new one would be compiled anew
def _squeeze(cap: float) -> Callable[..., Tensor]:
    def squeeze(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return squeeze


@lru_cache(maxsize=8)
def _causal_mask(queries: int, keys: int, device: torch.device) -> BlockMask:
    before = keys - queries
    return create_block_mask(lambda _b, _h, query, key: query + before >= key, None, None, queries, keys, device=device)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _flex_compiles(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Try a small problem, the backward pass included, which is compiled only when it is first taken.

    The hooks that change nothing stand before those of a layer which is to be computed again: it would miss the trial.
    """
    try:
        with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            q_BHTD, k_BHTD, v_BHTD = (
                torch.zeros(1, heads, PROBE_TOKENS, head_dim, dtype=dtype, device=device, requires_grad=True)
                for heads in (group, 1, 1)
            )
            flex_capped_attention(_compiled_flex(), q_BHTD, k_BHTD, v_BHTD, 1.0, 1.0).sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(f"flex_attention does not compile, so attention is slow: {error}", stacklevel=2)
        return False
    return True


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
