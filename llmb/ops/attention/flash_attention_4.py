"""Attention blocks by FlashAttention 4, the CuTe kernels of the package flash-attn-4 (extra `flash`).

    out_NHD, lse_HN = FLASH4.forward(block)                     # as the kernels of `attention_block.py`

Its backward pass is 11 % faster than cuDNN's on an H200, and it takes sequences of any lengths and sliding windows, for
which the alternative is FlashAttention-2. A kernel is compiled, for 5 to 15 seconds, for each combination of head_dim,
heads per KV head, mask and batched or packed sequences; lengths are arguments. So it is for sequences of
MIN_TOKENS tokens and more, where that pays.

With a softcap its backward pass is the fastest for heads of 256, as of Gemma (5.3 ms instead of 6.7 of our Triton
kernels for 8,192 tokens, 16 heads and 8 KV heads on an H200), its forward pass is not (1.5 and 1.1 ms).

The package offers the two passes, apart from an autograd function, under private names only: its version is pinned.
"""

import importlib
from functools import cache
from typing import Any

from torch import Tensor

from llmb.ops.attention.attention_block import AttentionBlock, AttentionKernel, varlen_arguments, window_arguments
from llmb.ops.device_capabilities import capabilities

MIN_TOKENS = 2048  # of the longest sequence, its context included
SOFTCAP_HEAD_DIM = 256  # with which its backward pass with a softcap is faster than ours


def takes_softcap_backward(block: AttentionBlock) -> bool:
    """Return whether the backward pass of a block with a softcap is faster with this kernel."""
    keys = len(block.k_KGD) // len(block.lengths)
    is_fast = block.q_NHD.shape[-1] == SOFTCAP_HEAD_DIM and keys >= MIN_TOKENS and _is_batch(block)
    return is_fast and capabilities(block.q_NHD.device).has("flash_attention_4")


class _Flash4:
    """Sequences of one length are a batch, others are packed."""

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        assert block.softcap is None or _is_batch(block), "packed sequences have no softcap"
        q, k, v = (_sequences(x, block) for x in (block.q_NHD, block.k_KGD, block.v_KGD))
        out, lse = _interface()._flash_attn_fwd(q, k, v, return_lse=True, **_arguments(block))
        if not _is_batch(block):
            return out, lse
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    def backward(
        self, dout_NHD: Tensor, block: AttentionBlock, out_NHD: Tensor, lse_HN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = block.q_NHD, block.k_KGD, block.v_KGD, out_NHD, dout_NHD
        lse = lse_HN.unflatten(1, (len(block.lengths), -1)).transpose(0, 1) if _is_batch(block) else lse_HN
        grads = _interface()._flash_attn_bwd(
            *(_sequences(x, block) for x in tensors), lse.contiguous(), **_arguments(block)
        )
        dq, dk, dv = (grad.flatten(0, 1) for grad in grads) if _is_batch(block) else grads
        return dq, dk, dv


def _is_batch(block: AttentionBlock) -> bool:
    return len(set(block.lengths)) == 1


def _sequences(x_NHD: Tensor, block: AttentionBlock) -> Tensor:
    """View as [B, S, H, D] where sequences have one length."""
    return x_NHD.unflatten(0, (len(block.lengths), -1)) if _is_batch(block) else x_NHD


def _arguments(block: AttentionBlock) -> dict[str, Any]:
    arguments = {"softmax_scale": block.scale, "causal": block.causal, **window_arguments(block.window)}
    if block.softcap is not None:
        arguments["softcap"] = block.softcap
    if _is_batch(block):
        return arguments
    cu_seqlens_q, cu_seqlens_k, max_q, max_k = varlen_arguments(block)
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return arguments | packed | {"max_seqlen_q": max_q, "max_seqlen_k": max_k}


@cache
def _interface() -> Any:
    """Import the package, which takes seconds, when it is first needed."""
    return importlib.import_module("flash_attn.cute.interface")


FLASH4: AttentionKernel = _Flash4()
