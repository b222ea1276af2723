"""Latent attention whose cache holds, for each token, one latent and one rotated key that all heads share.

    rotate_and_cache_latents(q_NHD, latent_NR, key_NK, norm_R, eps, cos_NF, sin_NF, cache, places_N)
    mixed_NHR = latent_attention(q_latent_NHR, q_turned_NHK, cache, spans, scale)
    mixed_NHV = expanded_attention(q_NHD, kv_THW, keys_TK, scale)

For the second, queries come with kv_up absorbed into them, so a latent is both key and value: a logit is the product of
latents plus that of rotated parts, and what comes out is a mix of latents, from which the caller makes values. The
third is for a long chunk of one sequence, whose latents so far the caller has expanded: there it is cheaper to multiply
the narrower keys and values of each head.

A cache in e4m3 holds latents so, which stand for themselves times its scale. Rotated keys, a ninth of the numbers, stay
as they are: no norm bounds them, and their rounding would touch every head's sense of position.

Shapes: N tokens, H heads, R latent rank, K width of the rotated key (F = K / 2 pairs), B blocks, L tokens of a block,
T tokens of a sequence, V width of a value, D width of a query, W = D - K + V.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.attention.attention_metadata import Spans
from llmb.ops.dispatch import takes_triton
from llmb.ops.quant.activation_quant import E4M3, LARGEST
from llmb.ops.rope.rope import rotate_interleaved


@dataclass(frozen=True)
class LatentCache:
    """Blocks of latents and rotated keys of one layer."""

    latents_BLR: Tensor
    keys_BLK: Tensor
    scale: float = 1.0  # what an e4m3 latent is multiplied by

    @property
    def block_tokens(self) -> int:
        return self.latents_BLR.shape[1]

    def at(self, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and rotated keys of these places, in the keys' format."""
        latents_TR = self.latents_BLR.flatten(0, 1)[places_T].to(self.keys_BLK.dtype)
        keys_TK = self.keys_BLK.flatten(0, 1)[places_T]
        return (latents_TR if self.scale == 1.0 else latents_TR * self.scale), keys_TK


def rotate_and_cache_latents_reference(
    q_NHD: Tensor,
    latent_NR: Tensor,
    key_NK: Tensor,
    norm_R: Tensor,
    eps: float,
    cos_NF: Tensor,
    sin_NF: Tensor,
    cache: LatentCache,
    places_N: Tensor,
) -> None:
    """Rotate the last K of each query in place; norm the latent, rotate the key, cache both. A place of -1 is left out.

    Pairs (2i, 2i + 1) come out as (i, i + F), in queries and keys alike.
    """
    width = key_NK.shape[-1]
    q_NHD[..., -width:] = rotate_interleaved(q_NHD[..., -width:], cos_NF, sin_NF)
    normed_NR = F.rms_norm(latent_NR, norm_R.shape, norm_R.to(latent_NR.dtype), eps)
    kept = places_N >= 0
    block, offset = places_N[kept] // cache.block_tokens, places_N[kept] % cache.block_tokens
    cache.latents_BLR[block, offset] = _rounded(normed_NR[kept] / cache.scale, cache.latents_BLR.dtype)
    turned_NK = rotate_interleaved(key_NK[:, None], cos_NF, sin_NF)[:, 0]
    cache.keys_BLK[block, offset] = turned_NK[kept].to(cache.keys_BLK.dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What lies beyond e4m3 becomes its largest number, as GPUs round, and not a NaN."""
    return x.clamp(-LARGEST, LARGEST).to(dtype) if dtype == E4M3 else x.to(dtype)


def rotate_and_cache_latents(
    q_NHD: Tensor,
    latent_NR: Tensor,
    key_NK: Tensor,
    norm_R: Tensor,
    eps: float,
    cos_NF: Tensor,
    sin_NF: Tensor,
    cache: LatentCache,
    places_N: Tensor,
) -> None:
    """The same in one kernel where there is one."""
    if takes_triton(q_NHD):
        from llmb.ops.attention.mla_attention_triton import rotate_and_cache_latents_triton

        return rotate_and_cache_latents_triton(q_NHD, latent_NR, key_NK, norm_R, eps, cos_NF, sin_NF, cache, places_N)
    return rotate_and_cache_latents_reference(q_NHD, latent_NR, key_NK, norm_R, eps, cos_NF, sin_NF, cache, places_N)


def latent_attention_reference(
    q_latent_NHR: Tensor, q_turned_NHK: Tensor, cache: LatentCache, spans: Spans, scale: float
) -> Tensor:
    """Sequence by sequence, in fp32, reading sizes on the host. Padding (tokens of no sequence) comes out as zero."""
    out_NHR = torch.zeros_like(q_latent_NHR)
    starts, lengths = spans.starts_P1.tolist(), spans.lengths_P.tolist()
    for part, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if start == end or length == 0:
            continue
        blocks_M = spans.table_PM[part, : -(-length // cache.block_tokens)].long()
        latents_TR = cache.latents_BLR[blocks_M].flatten(0, 1)[:length].float() * cache.scale
        keys_TK = cache.keys_BLK[blocks_M].flatten(0, 1)[:length].float()
        logits_QHT = q_latent_NHR[start:end].float() @ latents_TR.T + q_turned_NHK[start:end].float() @ keys_TK.T
        seen_QT = torch.ones(end - start, length, dtype=torch.bool, device=keys_TK.device).tril(length - (end - start))
        shares_QHT = (logits_QHT * scale).masked_fill(~seen_QT[:, None], float("-inf")).softmax(dim=-1)
        out_NHR[start:end] = (shares_QHT @ latents_TR).to(out_NHR.dtype)
    return out_NHR


def latent_attention(
    q_latent_NHR: Tensor, q_turned_NHK: Tensor, cache: LatentCache, spans: Spans, scale: float
) -> Tensor:
    """The same by kernels where there are some; there, padding that is in no part is left as it comes."""
    if takes_triton(q_latent_NHR):
        from llmb.ops.attention.mla_attention_triton import latent_attention_triton

        return latent_attention_triton(q_latent_NHR, q_turned_NHK, cache, spans, scale)
    return latent_attention_reference(q_latent_NHR, q_turned_NHK, cache, spans, scale)


def expanded_attention_reference(q_NHD: Tensor, kv_THW: Tensor, keys_TK: Tensor, scale: float) -> Tensor:
    """The last N of T tokens: the unrotated part of each head's keys with its values, and keys that all heads share."""
    nope = q_NHD.shape[-1] - keys_TK.shape[-1]
    k_THD = torch.cat((kv_THW[..., :nope], keys_TK[:, None].expand(-1, q_NHD.shape[1], -1)), dim=-1)
    q_HND, k_HTD, v_HTV = (x.transpose(0, 1) for x in (q_NHD, k_THD, kv_THW[..., nope:]))
    seen_NT = torch.ones(len(q_NHD), len(keys_TK), dtype=torch.bool, device=q_NHD.device).tril(
        len(keys_TK) - len(q_NHD)
    )
    return F.scaled_dot_product_attention(q_HND, k_HTD, v_HTV, seen_NT, scale=scale).transpose(0, 1)


def expanded_attention(q_NHD: Tensor, kv_THW: Tensor, keys_TK: Tensor, scale: float) -> Tensor:
    """The same by a kernel where there is one."""
    if takes_triton(q_NHD):
        from llmb.ops.attention.mla_attention_triton import expanded_attention_triton

        return expanded_attention_triton(q_NHD, kv_THW, keys_TK, scale)
    return expanded_attention_reference(q_NHD, kv_THW, keys_TK, scale)
