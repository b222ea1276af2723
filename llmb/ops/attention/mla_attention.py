"""Multi-head latent attention (MLA) over a paged cache of one latent and one RoPE key per token, shared by all heads.

    mla_rope_and_cache(q_NHD, latent_NR, key_NK, norm_R, eps, cos_NF, sin_NF, cache, slot_mapping_N)
    out_NHR = mla_attention(q_latent_NHR, q_rope_NHK, cache, metadata, scale)
    out_NHV = mla_prefill_attention(q_NHD, kv_THW, keys_TK, scale)

For the second, queries come with kv_up absorbed, so a latent is both key and value: a logit is the dot product of
latents plus that of RoPE parts, and the output is a weighted sum of latents, from which the caller computes values. The
third is for a long prefill chunk of one sequence, whose latents the caller has expanded: there the narrower keys and
values of each head are cheaper.

A cache in e4m3 holds latents so, times its scale. RoPE keys, a ninth of the numbers, are not quantized: no norm bounds
them, and rounding would disturb the positions that every head sees.

Shapes: N tokens, H heads, R latent rank, K width of the RoPE key (F = K / 2 pairs), B blocks, L tokens of a block, T
tokens of a sequence, V width of a value, D width of a query, W = D - K + V.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.attention.attention_metadata import AttentionMetadata, causal_mask
from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import E4M3, E4M3_MAX
from llmb.ops.rope.rope import apply_rope_interleaved


@dataclass(frozen=True)
class MlaCache:
    """Blocks of latents and RoPE keys of one layer."""

    latents_BLR: Tensor
    keys_BLK: Tensor
    scale: float = 1.0  # what an e4m3 latent is multiplied by

    @property
    def block_tokens(self) -> int:
        return self.latents_BLR.shape[1]

    def gather(self, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents and RoPE keys of these slots, in the dtype of the keys."""
        latents_TR = self.latents_BLR.flatten(0, 1)[slots_T].to(self.keys_BLK.dtype)
        keys_TK = self.keys_BLK.flatten(0, 1)[slots_T]
        return (latents_TR if self.scale == 1.0 else latents_TR * self.scale), keys_TK


@op
def mla_rope_and_cache(
    q_NHD: Tensor,
    latent_NR: Tensor,
    key_NK: Tensor,
    norm_R: Tensor,
    eps: float,
    cos_NF: Tensor,
    sin_NF: Tensor,
    cache: MlaCache,
    slot_mapping_N: Tensor,
) -> None:
    """Apply RoPE to the last K of each query in place and to the key, norm the latent, and cache latent and key.

    A slot of -1 is skipped. Pairs (2i, 2i + 1) come out as (i, i + F), in queries and keys alike.
    """
    width = key_NK.shape[-1]
    q_NHD[..., -width:] = apply_rope_interleaved(q_NHD[..., -width:], cos_NF, sin_NF)
    normed_NR = F.rms_norm(latent_NR, norm_R.shape, norm_R.to(latent_NR.dtype), eps)
    cached = slot_mapping_N >= 0
    block, offset = slot_mapping_N[cached] // cache.block_tokens, slot_mapping_N[cached] % cache.block_tokens
    cache.latents_BLR[block, offset] = _saturating_cast(normed_NR[cached] / cache.scale, cache.latents_BLR.dtype)
    rope_key_NK = apply_rope_interleaved(key_NK[:, None], cos_NF, sin_NF)[:, 0]
    cache.keys_BLK[block, offset] = rope_key_NK[cached].to(cache.keys_BLK.dtype)


def _saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast; beyond the range of e4m3 to its largest value, as GPUs do, and not to NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(dtype) if dtype == E4M3 else x.to(dtype)


@op
def mla_attention(
    q_latent_NHR: Tensor, q_rope_NHK: Tensor, cache: MlaCache, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Return the attention over cached latents, padding as zero (undefined from the kernels if in no sequence).

    The reference works sequence by sequence in fp32.
    """
    out_NHR = torch.zeros_like(q_latent_NHR)
    for tokens, length, blocks_M in metadata.sequences(cache.block_tokens):
        latents_TR = cache.latents_BLR[blocks_M].flatten(0, 1)[:length].float() * cache.scale
        keys_TK = cache.keys_BLK[blocks_M].flatten(0, 1)[:length].float()
        logits_QHT = q_latent_NHR[tokens].float() @ latents_TR.T + q_rope_NHK[tokens].float() @ keys_TK.T
        mask_QT = causal_mask(len(logits_QHT), length, keys_TK.device)
        probs_QHT = (logits_QHT * scale).masked_fill(~mask_QT[:, None], float("-inf")).softmax(dim=-1)
        out_NHR[tokens] = (probs_QHT @ latents_TR).to(out_NHR.dtype)
    return out_NHR


@op
def mla_prefill_attention(q_NHD: Tensor, kv_THW: Tensor, keys_TK: Tensor, scale: float) -> Tensor:
    """Return the causal attention of the last N of T tokens.

    `kv` has the part of each head's keys without RoPE, then its values; `keys` are the RoPE keys that heads share.
    """
    nope = q_NHD.shape[-1] - keys_TK.shape[-1]
    k_THD = torch.cat((kv_THW[..., :nope], keys_TK[:, None].expand(-1, q_NHD.shape[1], -1)), dim=-1)
    q_HND, k_HTD, v_HTV = (x.transpose(0, 1) for x in (q_NHD, k_THD, kv_THW[..., nope:]))
    mask_NT = causal_mask(len(q_NHD), len(keys_TK), q_NHD.device)
    return F.scaled_dot_product_attention(q_HND, k_HTD, v_HTV, mask_NT, scale=scale).transpose(0, 1)
