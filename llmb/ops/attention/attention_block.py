"""Attention between some queries and some keys, there and back, by three kernels that can stand for one another.

    out_NHD, lse_HN = kernel.forward(q_NHD, k_KGD, v_KGD, lengths, causal=True, scale=scale)
    dq_NHD, dk_KGD, dv_KGD = kernel.backward(dout_NHD, q_NHD, k_KGD, v_KGD, out_NHD, lse_HN, lengths, True, scale)

Causal: rows come in stretches of `lengths`, queries and keys alike, and each query sees the keys of its stretch up to
its own place. Not causal: one stretch, whose queries see all keys. On the way back `out` and `lse` may be those of a
softmax over more keys than these: the probabilities are exp(score - lse), and what a row's slopes have in common is the
sum of dout * out, so each part of the keys gets its exact share.

    PLAIN   torch's own operations, in fp32 and in blocks of rows; for all devices and formats
    CUDNN   the fastest on Hopper and later. It plans anew, for a tenth of a second or more, whenever it meets sizes
            that it has not seen: for sizes that recur, stretches of one length
    FLASH   FlashAttention-2, for stretches of any lengths

Log-sum-exps are natural and of the scaled scores. Shapes: N queries, K keys, H heads, G heads of keys (each serves
H / G heads of queries), D width of a head; q, k, v, out and dout are contiguous.
"""

from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

PLAIN_SCORES = 1 << 24  # most scores that the plain form holds at once
Lengths = tuple[int, ...]


class AttentionKernel(Protocol):
    """One of the three."""

    def forward(
        self, q_NHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, lengths: Lengths, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [N, H, D] in the format of q, and log-sum-exp [H, N] in fp32."""

    def backward(
        self,
        dout_NHD: Tensor,
        q_NHD: Tensor,
        k_KGD: Tensor,
        v_KGD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
        lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Slopes of q, k and v."""


class _Plain:
    def forward(
        self, q_NHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, lengths: Lengths, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        n, h, _ = q_NHD.shape
        out_NHD = torch.empty_like(q_NHD)
        lse_HN = torch.empty(h, n, dtype=_wide(q_NHD).dtype, device=q_NHD.device)
        for rows, keys in _blocks(q_NHD, k_KGD, lengths, causal):
            scores_GRNK = _scores(q_NHD, k_KGD, rows, keys, causal) * scale
            lse_HN[:, rows] = scores_GRNK.logsumexp(-1).flatten(0, 1)
            values = torch.einsum("grnk,kgd->ngrd", scores_GRNK.softmax(-1), _wide(v_KGD[keys]))
            out_NHD[rows] = values.flatten(1, 2).to(out_NHD.dtype)
        return out_NHD, lse_HN

    def backward(
        self,
        dout_NHD: Tensor,
        q_NHD: Tensor,
        k_KGD: Tensor,
        v_KGD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
        lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_NHD = torch.empty_like(_wide(q_NHD))
        dk_KGD, dv_KGD = (torch.zeros_like(_wide(x)) for x in (k_KGD, v_KGD))
        groups = k_KGD.shape[1]
        for rows, keys in _blocks(q_NHD, k_KGD, lengths, causal):
            q, dout = (_wide(x[rows]).unflatten(1, (groups, -1)) for x in (q_NHD, dout_NHD))
            k, v = (_wide(x[keys]) for x in (k_KGD, v_KGD))
            common_HN = (_wide(dout_NHD[rows]) * _wide(out_NHD[rows])).sum(-1).T
            lse_GRN1, common_GRN1 = (x.unflatten(0, (groups, -1))[..., None] for x in (lse_HN[:, rows], common_HN))
            shares_GRNK = (_scores(q_NHD, k_KGD, rows, keys, causal) * scale - lse_GRN1).exp()
            dshares_GRNK = torch.einsum("ngrd,kgd->grnk", dout, v)
            dscores_GRNK = shares_GRNK * (dshares_GRNK - common_GRN1) * scale
            dq_NHD[rows] = torch.einsum("grnk,kgd->ngrd", dscores_GRNK, k).flatten(1, 2)
            dk_KGD[keys] += torch.einsum("grnk,ngrd->kgd", dscores_GRNK, q)
            dv_KGD[keys] += torch.einsum("grnk,ngrd->kgd", shares_GRNK, dout)
        return dq_NHD, dk_KGD, dv_KGD


def _blocks(q_NHD: Tensor, k_KGD: Tensor, lengths: Lengths, causal: bool) -> list[tuple[slice, slice]]:
    """Rows to be computed at once, and all keys that any of them sees."""
    found = []
    for first, end in pairwise(accumulate(lengths, initial=0)):
        keys = end - first if causal else k_KGD.shape[0]
        step = max(1, PLAIN_SCORES // (q_NHD.shape[1] * keys))
        for row in range(first, end, step):
            stop = min(row + step, end)
            found.append((slice(row, stop), slice(first, stop) if causal else slice(0, keys)))
    return found


def _scores(q_NHD: Tensor, k_KGD: Tensor, rows: slice, keys: slice, causal: bool) -> Tensor:
    q_NGRD = _wide(q_NHD[rows]).unflatten(1, (k_KGD.shape[1], -1))
    scores_GRNK = torch.einsum("ngrd,kgd->grnk", q_NGRD, _wide(k_KGD[keys]))
    if causal:
        n, k = scores_GRNK.shape[-2:]
        unseen = torch.ones(n, k, dtype=torch.bool, device=q_NHD.device).triu(k - n + 1)
        scores_GRNK.masked_fill_(unseen, -torch.inf)
    return scores_GRNK


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Cudnn:
    """Stretches have one length S; there are B of them. What it makes is new memory, as torch offers no other way.

    Its plans are remembered by the strides of q, k and v alone: those of the others must always be the same, too.
    """

    def forward(
        self, q_NHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, lengths: Lengths, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_batched(x, lengths) for x in (q_NHD, k_KGD, v_KGD))
        out_BHSD, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        lse_BHS = lse.view(out_BHSD.shape[:3])
        return out_BHSD.transpose(1, 2).flatten(0, 1), lse_BHS.transpose(0, 1).flatten(1)

    def backward(
        self,
        dout_NHD: Tensor,
        q_NHD: Tensor,
        k_KGD: Tensor,
        v_KGD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
        lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (_batched(x, lengths) for x in (dout_NHD, q_NHD, k_KGD, v_KGD, out_NHD))
        lse = lse_HN.unflatten(1, (len(lengths), -1)).transpose(0, 1).contiguous()
        lse = lse[..., None] if _cudnn_lse_dims(q.device) == 4 else lse
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset of a dropout that is not there
        slopes = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            dout, q, k, v, out, lse, unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
        )
        dq, dk, dv = (slope.transpose(1, 2).flatten(0, 1) for slope in slopes)
        return dq, dk, dv


def _batched(x_NHD: Tensor, lengths: Lengths) -> Tensor:
    """[B, H, S, D] over the same memory."""
    return x_NHD.unflatten(0, (len(lengths), -1)).transpose(1, 2)


@cache
def _cudnn_lse_dims(device: torch.device) -> int:
    """Of the log-sum-exp that the way there gives and the way back takes: [B, H, S], since torch 2.9 [B, H, S, 1]."""
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention.default(x, x, x, None, True)[1].ndim


class _Flash:
    """Stretches are told by where they begin, in small tensors on the device, which are kept as long as they recur."""

    def forward(
        self, q_NHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, lengths: Lengths, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out_NHD, lse_HN, *_ = torch.ops.aten._flash_attention_forward.default(
            q_NHD, k_KGD, v_KGD, *_stretches(q_NHD, k_KGD, lengths, causal), 0.0, causal, False, scale=scale
        )
        return out_NHD, lse_HN

    def backward(
        self,
        dout_NHD: Tensor,
        q_NHD: Tensor,
        k_KGD: Tensor,
        v_KGD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
        lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stretches = _stretches(q_NHD, k_KGD, lengths, causal)
        state = torch.zeros(2, dtype=torch.uint64, device=q_NHD.device)  # of a dropout that is not there
        unused = torch.empty((), dtype=torch.uint64, device=q_NHD.device)
        return torch.ops.aten._flash_attention_backward.default(
            dout_NHD, q_NHD, k_KGD, v_KGD, out_NHD, lse_HN.contiguous(), *stretches, 0.0, causal, state, unused,
            scale=scale,
        )  # fmt: skip


def _stretches(q_NHD: Tensor, k_KGD: Tensor, lengths: Lengths, causal: bool) -> tuple[Tensor, Tensor, int, int]:
    """Where stretches of queries and of keys begin, and how long their longest are."""
    key_lengths = lengths if causal else (k_KGD.shape[0],)
    starts = (_starts(each, q_NHD.device) for each in (lengths, key_lengths))
    return (*starts, max(lengths), max(key_lengths))  # type: ignore[return-value]


@lru_cache(maxsize=64)
def _starts(lengths: Lengths, device: torch.device) -> Tensor:
    """Copied from pinned memory, so that the host does not wait."""
    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    return starts.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else starts.to(device)


PLAIN: AttentionKernel = _Plain()
CUDNN: AttentionKernel = _Cudnn()
FLASH: AttentionKernel = _Flash()
