"""Attention whose keys and values lie in blocks of a cache that many sequences share.

    write_cache(k_NHD, v_NHD, cache, places_N)
    out_NHD = paged_attention(q_NHD, cache, ...)

A cache holds, for each block, keys [heads, tokens, width] and values [heads, width, tokens]: values lie transposed, so
that both products of attention find the dimension they sum over contiguous, which 8-bit loads need. It may be in the
format of the activations or in e4m3, whose numbers stand for themselves times the cache's scales.

The tokens of a step are the last of their sequences; each attends to itself and all before it.

Shapes: N tokens, P sequences, H query heads, G heads of keys and values, D width of a head, M blocks of a sequence,
L tokens of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmb.kernels.triton_device import takes_triton


@dataclass(frozen=True)
class KvCache:
    """Blocks of keys and values of one layer."""

    keys_BGLD: Tensor
    values_BGDL: Tensor
    key_scale: float = 1.0  # what an e4m3 key is multiplied by
    value_scale: float = 1.0

    @property
    def block_tokens(self) -> int:
        return self.keys_BGLD.shape[2]


@dataclass(frozen=True)
class Spans:
    """Which of a step's tokens belong to which sequence, and where that sequence lies: see `infer/step.py`."""

    starts_P1: Tensor  # int32
    lengths_P: Tensor  # int32
    table_PM: Tensor  # int32
    decodes: int  # the first so many sequences have one token each
    longest_part: int  # tokens of the longest part
    longest: int  # at least the largest of lengths_P


def write_cache(k_NGD: Tensor, v_NGD: Tensor, cache: KvCache, places_N: Tensor) -> None:
    """Keys and values to their places, rounded to the cache's format; a place of -1 is left out."""
    kept = places_N >= 0
    places, length = places_N[kept], cache.block_tokens
    block, offset = places // length, places % length
    cache.keys_BGLD[block, :, offset] = (k_NGD[kept] / cache.key_scale).to(cache.keys_BGLD.dtype)
    cache.values_BGDL[block, :, :, offset] = (v_NGD[kept] / cache.value_scale).to(cache.values_BGDL.dtype)


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


def paged_attention(q_NHD: Tensor, cache: KvCache, spans: Spans, scale: float, cap: float | None = None) -> Tensor:
    """The same by kernels where there are some."""
    if takes_triton(q_NHD):
        from llmb.kernels.paged_attention_triton import paged_attention_triton

        return paged_attention_triton(q_NHD, cache, spans, scale, cap)
    return paged_attention_reference(q_NHD, cache, spans, scale, cap)
