"""Attention between a block of queries and a block of keys, forward and backward, by interchangeable kernels.

    block = AttentionBlock(q_NHD, k_KGD, v_KGD, lengths, causal=True, scale=scale)
    out_NHD, lse_HN = kernel.forward(block)
    dq_NHD, dk_KGD, dv_KGD = kernel.backward(dout_NHD, block, out_NHD, lse_HN)

Causal: rows are packed sequences of `lengths`, queries and keys alike, and each query sees the keys of its sequence up
to its own position; a single sequence may have more keys than queries, which are then the last. With a sliding window a
query sees at most the last `window` of those keys. Not causal: one sequence, whose queries see all keys. In the
backward pass `out` and `lse` may be those of a softmax over more keys than these: the probabilities are
exp(score - lse), and the common term of a row is sum(dout * out), so each block of keys gets its exact gradient.

    PLAIN   torch operations, in fp32 and in blocks of rows; for all devices and dtypes, with a softcap or without
    CUDNN   the fastest of torch's on Hopper and later. It builds a plan, for a tenth of a second or more, for every new
            size: for recurring sizes, sequences of one length; without a window
    FLASH   FlashAttention-2, for sequences of any lengths

`flash_attention_4.py` has FlashAttention 4, where its package is installed, `softcap_block_triton.py` the one for
logits with a softcap.

Log-sum-exps are natural and of the scaled scores. Shapes: N queries, K keys, H heads, G KV heads (each serves H / G
query heads), D head_dim. out and dout are contiguous; q, k and v may be heads inside wider rows.
"""

from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from llmb.ops.attention.attention_metadata import causal_mask
from llmb.ops.tensor_layout import at_least_fp32

MAX_PLAIN_SCORES = 1 << 24  # most scores that the plain kernel holds at once
Lengths = tuple[int, ...]


class AttentionBlock(NamedTuple):
    """Queries, keys and values, and which keys a query sees."""

    q_NHD: Tensor
    k_KGD: Tensor
    v_KGD: Tensor
    lengths: Lengths
    causal: bool
    scale: float
    window: int | None = None  # causal: keys that a query sees at most, its own included
    softcap: float | None = None  # of scaled scores: softcap * tanh(score / softcap)


class AttentionKernel(Protocol):
    """Interface of the kernels."""

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """Return the output [N, H, D] in the dtype of q, and the log-sum-exp [H, N] in fp32."""

    def backward(
        self, dout_NHD: Tensor, block: AttentionBlock, out_NHD: Tensor, lse_HN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv."""


class _Plain:
    @record_function("attention")
    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        q_NHD, k_KGD, v_KGD, lengths, causal, *_ = block
        n, h, _ = q_NHD.shape
        out_NHD = torch.empty_like(q_NHD)
        lse_HN = torch.empty(h, n, dtype=at_least_fp32(q_NHD).dtype, device=q_NHD.device)
        for rows, keys in _blocks(q_NHD, k_KGD, lengths, causal):
            scores_GRNK, _ = _scores(block, rows, keys)
            lse_HN[:, rows] = scores_GRNK.logsumexp(-1).flatten(0, 1)
            values = torch.einsum("grnk,kgd->ngrd", scores_GRNK.softmax(-1), at_least_fp32(v_KGD[keys]))
            out_NHD[rows] = values.flatten(1, 2).to(out_NHD.dtype)
        return out_NHD, lse_HN

    @record_function("attention")
    def backward(
        self, dout_NHD: Tensor, block: AttentionBlock, out_NHD: Tensor, lse_HN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_NHD, k_KGD, v_KGD, lengths, causal, scale, *_ = block
        dq_NHD = torch.empty_like(at_least_fp32(q_NHD))
        dk_KGD, dv_KGD = (torch.zeros_like(at_least_fp32(x)) for x in (k_KGD, v_KGD))
        groups = k_KGD.shape[1]
        for rows, keys in _blocks(q_NHD, k_KGD, lengths, causal):
            q, dout = (at_least_fp32(x[rows]).unflatten(1, (groups, -1)) for x in (q_NHD, dout_NHD))
            k, v = (at_least_fp32(x[keys]) for x in (k_KGD, v_KGD))
            delta_HN = (at_least_fp32(dout_NHD[rows]) * at_least_fp32(out_NHD[rows])).sum(-1).T
            lse_GRN1, delta_GRN1 = (x.unflatten(0, (groups, -1))[..., None] for x in (lse_HN[:, rows], delta_HN))
            scores_GRNK, derivative_GRNK = _scores(block, rows, keys)
            probs_GRNK = (scores_GRNK - lse_GRN1).exp()
            dprobs_GRNK = torch.einsum("ngrd,kgd->grnk", dout, v)
            dscores_GRNK = probs_GRNK * (dprobs_GRNK - delta_GRN1) * scale
            if derivative_GRNK is not None:
                dscores_GRNK *= derivative_GRNK
            dq_NHD[rows] = torch.einsum("grnk,kgd->ngrd", dscores_GRNK, k).flatten(1, 2)
            dk_KGD[keys] += torch.einsum("grnk,ngrd->kgd", dscores_GRNK, q)
            dv_KGD[keys] += torch.einsum("grnk,ngrd->kgd", probs_GRNK, dout)
        return dq_NHD, dk_KGD, dv_KGD


def _blocks(q_NHD: Tensor, k_KGD: Tensor, lengths: Lengths, causal: bool) -> list[tuple[slice, slice]]:
    """Return rows to be computed at once, and all keys that any of them sees."""
    blocks, context = [], k_KGD.shape[0] - q_NHD.shape[0] if causal else 0  # keys before those of the queries
    assert context == 0 or len(lengths) == 1, "only one sequence has more keys than queries"
    for first, end in pairwise(accumulate(lengths, initial=0)):
        keys = end - first + context if causal else k_KGD.shape[0]
        step = max(1, MAX_PLAIN_SCORES // (q_NHD.shape[1] * keys))
        for row in range(first, end, step):
            stop = min(row + step, end)
            blocks.append((slice(row, stop), slice(first, stop + context) if causal else slice(0, keys)))
    return blocks


def _scores(block: AttentionBlock, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
    """Return the scaled scores, and the derivative of their softcap if there is one."""
    q_NHD, k_KGD, *_, window, softcap = block
    q_NGRD = at_least_fp32(q_NHD[rows]).unflatten(1, (k_KGD.shape[1], -1))
    scores_GRNK = torch.einsum("ngrd,kgd->grnk", q_NGRD, at_least_fp32(k_KGD[keys])) * block.scale
    derivative_GRNK = None
    if softcap is not None:
        tanh_GRNK = torch.tanh(scores_GRNK / softcap)
        scores_GRNK, derivative_GRNK = softcap * tanh_GRNK, 1 - tanh_GRNK.square()
    if block.causal:
        n, k = scores_GRNK.shape[-2:]
        scores_GRNK.masked_fill_(~causal_mask(n, k, q_NHD.device, window), -torch.inf)
    return scores_GRNK, derivative_GRNK


class _Cudnn:
    """There are B sequences of one length S. Results are newly allocated, as torch offers no other way.

    Its plans are cached by the strides of q, k and v alone: those of the others must always be the same, too.
    """

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        q_NHD, k_KGD, v_KGD, lengths, causal, scale, window, softcap = block
        assert window is None, "cuDNN's attention in torch has no window"
        assert softcap is None, "cuDNN's attention in torch has no softcap"
        q, k, v = (batched(x, lengths) for x in (q_NHD, k_KGD, v_KGD))
        out_BHSD, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        lse_BHS = lse.view(out_BHSD.shape[:3])
        return out_BHSD.transpose(1, 2).flatten(0, 1), lse_BHS.transpose(0, 1).flatten(1)

    def backward(
        self, dout_NHD: Tensor, block: AttentionBlock, out_NHD: Tensor, lse_HN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_NHD, k_KGD, v_KGD, lengths, causal, scale, *_ = block
        dout, q, k, v, out = (batched(x, lengths) for x in (dout_NHD, q_NHD, k_KGD, v_KGD, out_NHD))
        lse = lse_HN.unflatten(1, (len(lengths), -1)).transpose(0, 1).contiguous()
        lse = lse[..., None] if _cudnn_lse_dims(q.device) == 4 else lse
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset of an absent dropout
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            dout, q, k, v, out, lse, unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
        )
        dq, dk, dv = (grad.transpose(1, 2).flatten(0, 1) for grad in grads)
        return dq, dk, dv


def batched(x_NHD: Tensor, lengths: Lengths) -> Tensor:
    """View packed sequences as [B, H, S, D]."""
    return x_NHD.unflatten(0, (len(lengths), -1)).transpose(1, 2)


@cache
def _cudnn_lse_dims(device: torch.device) -> int:
    """Return the rank of the log-sum-exp between forward and backward: [B, H, S], since torch 2.9 [B, H, S, 1]."""
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention.default(x, x, x, None, True)[1].ndim


class _Flash:
    """Takes sequences as cu_seqlens, small tensors on the device, which are cached."""

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        q_NHD, k_KGD, v_KGD, _, causal, scale, window, softcap = block
        assert softcap is None, "FlashAttention in torch has no softcap"
        out_NHD, lse_HN, *_ = torch.ops.aten._flash_attention_forward.default(
            q_NHD, k_KGD, v_KGD, *varlen_arguments(block), 0.0, causal, False, scale=scale,
            **window_arguments(window),
        )  # fmt: skip
        return out_NHD, lse_HN

    def backward(
        self, dout_NHD: Tensor, block: AttentionBlock, out_NHD: Tensor, lse_HN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_NHD, k_KGD, v_KGD, _, causal, scale, window, _ = block
        varlen = varlen_arguments(block)
        state = torch.zeros(2, dtype=torch.uint64, device=q_NHD.device)  # of an absent dropout
        unused = torch.empty((), dtype=torch.uint64, device=q_NHD.device)
        return torch.ops.aten._flash_attention_backward.default(
            dout_NHD, q_NHD, k_KGD, v_KGD, out_NHD, lse_HN.contiguous(), *varlen, 0.0, causal, state, unused,
            scale=scale, **window_arguments(window),
        )  # fmt: skip


def window_arguments(window: int | None) -> dict[str, int]:
    """Return the window as FlashAttention counts it: keys before the query's own, and after it."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def varlen_arguments(block: AttentionBlock) -> tuple[Tensor, Tensor, int, int]:
    """Return cu_seqlens of queries and keys, and the longest sequences of both."""
    device, keys, lengths = block.q_NHD.device, len(block.k_KGD), block.lengths
    key_lengths = lengths if block.causal and len(block.q_NHD) == keys else (keys,)
    return _cu_seqlens(lengths, device), _cu_seqlens(key_lengths, device), max(lengths), max(key_lengths)


@lru_cache(maxsize=64)
def _cu_seqlens(lengths: Lengths, device: torch.device) -> Tensor:
    """Copy from pinned memory, so that the host does not wait."""
    cu_seqlens = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    return cu_seqlens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else cu_seqlens.to(device)


PLAIN: AttentionKernel = _Plain()
CUDNN: AttentionKernel = _Cudnn()
FLASH: AttentionKernel = _Flash()
