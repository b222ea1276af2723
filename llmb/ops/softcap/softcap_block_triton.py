"""Attention with logit softcap between a block of queries and a block of keys: a kernel as in `attention_block.py`.

For bf16 on a GPU, by the Triton kernels of `softcap_attention_triton.py`, backward by FlashAttention 4 where it is
faster. Sequences of one length are one call, others one each.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import log

import torch
from torch import Tensor

from llmb.ops.attention.attention_block import AttentionBlock, AttentionKernel, batched
from llmb.ops.attention.flash_attention_4 import FLASH4, takes_softcap_backward
from llmb.ops.softcap.softcap_attention_triton import (
    Logits,
    softcap_backward_dkv,
    softcap_backward_dq,
    softcap_forward,
)

LN_2 = log(2)


class _Softcap:
    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        if len(set(block.lengths)) > 1:
            outs, lses = zip(*(self.forward(sequence) for _, sequence in _sequences(block)), strict=True)
            return torch.cat(outs), torch.cat(lses, dim=1)
        q, k, v = (batched(x, block.lengths) for x in block[:3])
        out_BHSD, lse_BHS = softcap_forward(q, k, v, _logits(block))
        return out_BHSD.transpose(1, 2).flatten(0, 1), lse_BHS.transpose(0, 1).flatten(1) * LN_2

    def backward(
        self, dout_NHD: Tensor, block: AttentionBlock, out_NHD: Tensor, lse_HN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if takes_softcap_backward(block):
            return FLASH4.backward(dout_NHD, block, out_NHD, lse_HN)
        if len(set(block.lengths)) > 1:
            grads = [
                self.backward(dout_NHD[rows], sequence, out_NHD[rows], lse_HN[:, rows])
                for rows, sequence in _sequences(block)
            ]
            dq, dk, dv = (torch.cat(x) for x in zip(*grads, strict=True))
            return dq, dk, dv
        dout, q, k, v, out = (batched(x, block.lengths) for x in (dout_NHD, *block[:3], out_NHD))
        lse_BHS = (lse_HN / LN_2).unflatten(1, (len(block.lengths), -1)).transpose(0, 1).contiguous()
        logits = _logits(block)
        dq_BHSD, delta_BHS = softcap_backward_dq(dout, out, lse_BHS, q, k, v, logits)
        dkv = softcap_backward_dkv(dout, lse_BHS, delta_BHS, q, k, v, logits)
        dq, dk, dv = (grad.transpose(1, 2).flatten(0, 1) for grad in (dq_BHSD, *dkv))
        return dq, dk, dv


def _logits(block: AttentionBlock) -> Logits:
    assert block.softcap is not None
    return Logits(block.scale, block.softcap, block.window, block.causal)


def _sequences(block: AttentionBlock) -> Iterator[tuple[slice, AttentionBlock]]:
    """Yield each of several sequences with its rows."""
    assert block.causal, "only one sequence is not causal"
    for start, end in pairwise(accumulate(block.lengths, initial=0)):
        rows = slice(start, end)
        q_NHD, k_NGD, v_NGD = (x[rows] for x in block[:3])
        yield rows, block._replace(q_NHD=q_NHD, k_KGD=k_NGD, v_KGD=v_NGD, lengths=(end - start,))


SOFTCAP: AttentionKernel = _Softcap()
