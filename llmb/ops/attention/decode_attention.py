"""Decode attention for a handful of sequences: RoPE, KV cache write and attention in one kernel.

    out_NHD = decode_attention(qkv_NW, cos_ND, sin_ND, cache, slot_mapping_N, metadata, scale, softcap, window, sinks)

Each sequence has one token. It sees its own key and value unrounded, earlier ones as the cache holds them; so the
kernel can read the cache while the GEMM of q, k and v is still running.

Shapes: as in `paged_attention.py`.
"""

from torch import Tensor

from llmb.ops.attention.attention_metadata import AttentionMetadata
from llmb.ops.attention.paged_attention import KvCache, paged_attention, rope_and_cache
from llmb.ops.dispatch import op


@op
def decode_attention(
    qkv_NW: Tensor,
    cos_ND: Tensor | None,
    sin_ND: Tensor | None,
    cache: KvCache,
    slot_mapping_N: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Apply RoPE, write keys and values to the cache and return the attention; the kernel writes nothing of padding."""
    qkv = rope_and_cache.reference(qkv_NW, cos_ND, sin_ND, cache, slot_mapping_N)
    return paged_attention.reference(*qkv, cache, metadata, scale, softcap, window, sinks_H)
