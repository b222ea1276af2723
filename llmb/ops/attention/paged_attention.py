"""Attention whose keys and values lie in blocks of a cache that many sequences share.

    q_NHD, k_NGD, v_NGD = rotate_and_cache(qkv_NW, heads, cos_ND, sin_ND, cache, places_N)
    out_NHD = paged_attention(q_NHD, k_NGD, v_NGD, cache, spans, scale)

A cache holds, for each block, keys [heads, tokens, width] and values [heads, width, tokens]: values lie transposed, so
that both products of attention find the dimension they sum over contiguous, which 8-bit loads need. It may be in the
format of the activations or in e4m3, whose numbers stand for themselves times the cache's scales.

The tokens of a step are the last of their sequences; each attends to itself and all before it. On a GPU a token sees
the keys and values of its own step as they were made, before rounding; those of earlier steps as the cache holds them.

Shapes: N tokens, P sequences, H query heads, G heads of keys and values, D width of a head, W = (H + 2 G) D, M blocks
of a sequence, L tokens of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.ops.attention.attention_metadata import Spans
from llmb.ops.dispatch import takes_triton
from llmb.ops.rope.rope import rotate


@dataclass(frozen=True)
class KvCache:
    """Blocks of keys and values of one layer."""

    keys_BGLD: Tensor
    values_BGDL: Tensor
    key_scale: float = 1.0  # what an e4m3 key is multiplied by
    value_scale: float = 1.0

    @property
    def kv_heads(self) -> int:
        return self.keys_BGLD.shape[1]

    @property
    def block_tokens(self) -> int:
        return self.keys_BGLD.shape[2]

    @property
    def width(self) -> int:
        return self.keys_BGLD.shape[3]


def rotate_and_cache_reference(
    qkv_NW: Tensor, cos_ND: Tensor | None, sin_ND: Tensor | None, cache: KvCache, places_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned by their positions; keys and values to their places. A place of -1 is left out."""
    rows_NXD = qkv_NW.unflatten(-1, (-1, cache.width))
    heads = rows_NXD.shape[1] - 2 * cache.kv_heads
    q_NHD, k_NGD, v_NGD = rows_NXD.split((heads, cache.kv_heads, cache.kv_heads), dim=1)
    if cos_ND is not None and sin_ND is not None:
        q_NHD, k_NGD = (rotate(x, cos_ND, sin_ND) for x in (q_NHD, k_NGD))
    kept = places_N >= 0
    places, length = places_N[kept], cache.block_tokens
    block, offset = places // length, places % length
    cache.keys_BGLD[block, :, offset] = (k_NGD[kept] / cache.key_scale).to(cache.keys_BGLD.dtype)
    cache.values_BGDL[block, :, :, offset] = (v_NGD[kept] / cache.value_scale).to(cache.values_BGDL.dtype)
    return q_NHD, k_NGD, v_NGD


def rotate_and_cache(
    qkv_NW: Tensor, cos_ND: Tensor | None, sin_ND: Tensor | None, cache: KvCache, places_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in one kernel where there is one, which then writes over `qkv_NW`."""
    if takes_triton(qkv_NW):
        from llmb.ops.attention.kv_cache_write_triton import rotate_and_cache_triton

        return rotate_and_cache_triton(qkv_NW, cos_ND, sin_ND, cache, places_N)
    return rotate_and_cache_reference(qkv_NW, cos_ND, sin_ND, cache, places_N)


def paged_attention_reference(
    q_NHD: Tensor, cache: KvCache, spans: Spans, scale: float, cap: float | None = None
) -> Tensor:
    """Sequence by sequence, in fp32, reading sizes on the host. Padding (tokens of no sequence) comes out as zero."""
    out_NHD = torch.zeros_like(q_NHD)
    starts, lengths = spans.starts_P1.tolist(), spans.lengths_P.tolist()
    group = q_NHD.shape[1] // cache.keys_BGLD.shape[1]
    for part, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if start == end:
            continue
        blocks_M = spans.table_PM[part, : -(-length // cache.block_tokens)].long()
        k_GTD = cache.keys_BGLD[blocks_M].transpose(0, 1).flatten(1, 2)[:, :length].float() * cache.key_scale
        v_GTD = cache.values_BGDL[blocks_M].permute(1, 0, 3, 2).flatten(1, 2)[:, :length].float() * cache.value_scale
        q_HTD = q_NHD[start:end].transpose(0, 1).float()
        logits_HQT = (q_HTD @ k_GTD.repeat_interleave(group, 0).transpose(1, 2)) * scale
        if cap is not None:
            logits_HQT = cap * torch.tanh(logits_HQT / cap)
        seen_QT = torch.ones(end - start, length, dtype=torch.bool, device=q_NHD.device).tril(length - (end - start))
        shares_HQT = logits_HQT.masked_fill(~seen_QT, float("-inf")).softmax(dim=-1)
        mixed_HQD = shares_HQT @ v_GTD.repeat_interleave(group, 0)
        out_NHD[start:end] = mixed_HQD.transpose(0, 1).to(out_NHD.dtype)
    return out_NHD


def paged_attention(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    cache: KvCache,
    spans: Spans,
    scale: float,
    cap: float | None = None,
) -> Tensor:
    """The same by kernels where there are some; they take this step's own keys and values as they are."""
    if takes_triton(q_NHD):
        from llmb.ops.attention.paged_attention_triton import paged_attention_triton

        return paged_attention_triton(q_NHD, k_NGD, v_NGD, cache, spans, scale, cap)
    return paged_attention_reference(q_NHD, cache, spans, scale, cap)
