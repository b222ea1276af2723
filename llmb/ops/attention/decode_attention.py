"""Attention of a handful of sequences that generate: rotation, the cache and attention itself in one kernel.

    out_NHD = thin_attention(qkv_NW, cos_ND, sin_ND, cache, places_N, spans, scale, cap)

Each sequence has one token. It sees its own key and value as they were made, earlier ones as the cache holds them; so
the kernel can read the cache while the product that makes q, k and v is still at work.

Shapes: as in `paged_attention.py`.
"""

from torch import Tensor

from llmb.ops.attention.attention_metadata import Spans
from llmb.ops.attention.paged_attention import KvCache, paged_attention_reference, rotate_and_cache_reference
from llmb.ops.dispatch import takes_triton


def thin_attention_reference(
    qkv_NW: Tensor,
    cos_ND: Tensor | None,
    sin_ND: Tensor | None,
    cache: KvCache,
    places_N: Tensor,
    spans: Spans,
    scale: float,
    cap: float | None,
) -> Tensor:
    """One after the other, in plain torch."""
    q_NHD, _, _ = rotate_and_cache_reference(qkv_NW, cos_ND, sin_ND, cache, places_N)
    return paged_attention_reference(q_NHD, cache, spans, scale, cap)


def thin_attention(
    qkv_NW: Tensor,
    cos_ND: Tensor | None,
    sin_ND: Tensor | None,
    cache: KvCache,
    places_N: Tensor,
    spans: Spans,
    scale: float,
    cap: float | None,
) -> Tensor:
    """The same in one kernel where there is one, which writes nothing of padding."""
    if takes_triton(qkv_NW):
        from llmb.ops.attention.decode_attention_triton import thin_attention_triton

        return thin_attention_triton(qkv_NW, cos_ND, sin_ND, cache, places_N, spans, scale, cap)
    return thin_attention_reference(qkv_NW, cos_ND, sin_ND, cache, places_N, spans, scale, cap)
