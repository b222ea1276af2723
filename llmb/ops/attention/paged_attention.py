"""Attention over a paged KV cache that many sequences share.

    q_NHD, k_NGD, v_NGD = rope_and_cache(qkv_NW, cos_ND, sin_ND, cache, slot_mapping_N, norms)
    out_NHD = paged_attention(q_NHD, k_NGD, v_NGD, cache, metadata, scale)

A cache holds, for each block, keys [heads, tokens, head_dim] and values [heads, head_dim, tokens]: values are
transposed, so that both GEMMs of attention find their summed dimension contiguous, which fp8 loads need. It has the
dtype of the activations, or e4m3, whose values are multiplied by the cache's scales.

The tokens of a step are the last of their sequences; each attends to itself and all before it. On a GPU a token sees
the keys and values of its own step before quantization; those of earlier steps as the cache holds them.

Shapes: N tokens, P sequences, H query heads, G KV heads, D head_dim, W = (H + 2 G) D, M blocks of a sequence, L tokens
of a block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.attention.attention_metadata import AttentionMetadata, causal_mask
from llmb.ops.dispatch import op
from llmb.ops.norm.qkv_norm import qkv_norm_
from llmb.ops.rope.rope import apply_rope


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
    def head_dim(self) -> int:
        return self.keys_BGLD.shape[3]


class HeadNorms(NamedTuple):
    """RMSNorm of each head of queries and keys, before RoPE."""

    q_D: Tensor
    k_D: Tensor
    eps: float


@op(triton="attention.kv_cache_write_triton:rope_and_cache_triton")
def rope_and_cache(
    qkv_NW: Tensor,
    cos_ND: Tensor | None,
    sin_ND: Tensor | None,
    cache: KvCache,
    slot_mapping_N: Tensor,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm queries and keys, apply RoPE to them, write keys and values to their slots, and return all three.

    A slot of -1 is skipped. The kernel works in place: it returns views of `qkv_NW`, which it overwrites. It norms only
    what it also rotates.
    """
    heads = qkv_NW.shape[1] // cache.head_dim - 2 * cache.kv_heads
    if norms is not None:
        qkv_NW = qkv_NW.clone()
        qkv_norm_.reference(qkv_NW, heads, cache.kv_heads, None, (norms.q_D, norms.k_D), norms.eps)
    heads_NXD = qkv_NW.unflatten(-1, (-1, cache.head_dim))
    q_NHD, k_NGD, v_NGD = heads_NXD.split((heads, cache.kv_heads, cache.kv_heads), dim=1)
    if cos_ND is not None and sin_ND is not None:
        q_NHD, k_NGD = (apply_rope(x, cos_ND, sin_ND) for x in (q_NHD, k_NGD))
    cached = slot_mapping_N >= 0
    block, offset = slot_mapping_N[cached] // cache.block_tokens, slot_mapping_N[cached] % cache.block_tokens
    cache.keys_BGLD[block, :, offset] = (k_NGD[cached] / cache.key_scale).to(cache.keys_BGLD.dtype)
    cache.values_BGDL[block, :, :, offset] = (v_NGD[cached] / cache.value_scale).to(cache.values_BGDL.dtype)
    return q_NHD, k_NGD, v_NGD


@op
def paged_attention(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    cache: KvCache,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    fp8_prefills: bool = False,
) -> Tensor:
    """Return the causal attention of each sequence, padding as zero (undefined from the kernels).

    With a sliding window a token attends to itself and the `window` - 1 tokens before it. A sink is one more logit of
    the softmaxes of its head, without a value.

    `k_NGD` and `v_NGD` of this step are in the cache already. The kernels take them unquantized; the reference, which
    works sequence by sequence in fp32, reads them from the cache. No block wholly before the windows of a sequence's
    tokens is read, so that the block table may name any block in its place.

    `fp8_prefills`: kernels compute long whole prompts in fp8 (`fp8_prefill.py`), with keys and values as the cache
    holds them; the reference rounds neither queries nor probabilities.
    """
    del k_NGD, v_NGD, fp8_prefills
    out_NHD = torch.zeros_like(q_NHD)
    group = q_NHD.shape[1] // cache.kv_heads
    for tokens, length, blocks_M in metadata.sequences(cache.block_tokens):
        q_HQD = q_NHD[tokens].transpose(0, 1).float()
        queries = q_HQD.shape[1]
        skipped = 0 if window is None else max(0, length - queries - window + 1) // cache.block_tokens
        blocks_M, first = blocks_M[skipped:], skipped * cache.block_tokens
        k_GTD = cache.keys_BGLD[blocks_M].transpose(0, 1).flatten(1, 2)[:, : length - first].float() * cache.key_scale
        v_GTD = cache.values_BGDL[blocks_M].permute(1, 0, 3, 2).flatten(1, 2)[:, : length - first].float()
        v_GTD = v_GTD * cache.value_scale
        logits_HQT = (q_HQD @ k_GTD.repeat_interleave(group, 0).transpose(1, 2)) * scale
        if softcap is not None:
            logits_HQT = softcap * torch.tanh(logits_HQT / softcap)
        mask_QT = causal_mask(queries, length, q_NHD.device, window)[:, first:]
        logits_HQT = logits_HQT.masked_fill(~mask_QT, float("-inf"))
        if sinks_H is not None:
            sinks_HQ1 = sinks_H.float()[:, None, None].expand(-1, logits_HQT.shape[1], 1)
            logits_HQT = torch.cat((logits_HQT, sinks_HQ1), dim=-1)
        probs_HQT = logits_HQT.softmax(dim=-1)[..., : length - first]
        out_NHD[tokens] = (probs_HQT @ v_GTD.repeat_interleave(group, 0)).transpose(0, 1).to(out_NHD.dtype)
    return out_NHD
