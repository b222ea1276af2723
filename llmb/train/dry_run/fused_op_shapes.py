"""Saved tensors and allocations of fused GPU attention, which torch on a CPU would decompose into smaller operations.

Inside `fused_shapes` attention allocates what the GPU kernels do and computes nothing. It saves its inputs, its output
and one fp32 logsumexp per query; the output has the memory layout of the query.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.attention import segment_attention
from llmb.ops.attention.attention_block import AttentionBlock


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, count: Callable[[int], None]) -> Tensor:
        shape = (*q_BHTD.shape[:3], v_BHTD.shape[-1])
        batch, heads, tokens, width = shape
        in_order = q_BHTD.stride(1) >= q_BHTD.stride(2)
        out = q_BHTD.new_empty(shape) if in_order else q_BHTD.new_empty(batch, tokens, heads, width).transpose(1, 2)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=q_BHTD.device)
        ctx.save_for_backward(q_BHTD, k_BHTD, v_BHTD, out, lse)
        ctx.count = count
        count(1)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, k_BHTD, v_BHTD, _, lse = ctx.saved_tensors
        ctx.count(2)
        delta = torch.empty_like(lse)
        grads = tuple(torch.empty_like(x) for x in (q_BHTD, k_BHTD, v_BHTD))
        del delta
        return *grads, None


class _SegmentAttention:
    """Attention kernel of fused layers and of context parallelism: implements `attention_block.AttentionKernel`."""

    def __init__(self, convention: str, count: Callable[[float], None]):
        self._masked, self._count = 0.5 if convention == "causal" else 0.0, count

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        self._count_flops(1, block)
        q_NHD = block.q_NHD
        return torch.empty_like(q_NHD), q_NHD.new_empty(q_NHD.shape[1], len(q_NHD), dtype=torch.float32)

    def backward(
        self, _dout: Tensor, block: AttentionBlock, _out: Tensor, _lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._count_flops(2, block)
        return torch.empty_like(block.q_NHD), torch.empty_like(block.k_KGD), torch.empty_like(block.v_KGD)

    def _count_flops(self, times: int, block: AttentionBlock) -> None:
        queries, heads, width = block.q_NHD.shape
        pairs = float(queries * len(block.k_KGD))
        if block.causal:
            keys = [min(length, block.window or length) for length in block.lengths]
            counts = zip(block.lengths, keys, strict=True)
            pairs = sum(length * seen - seen * seen * self._masked for length, seen in counts)
        self._count(times * 4 * heads * width * pairs)


@contextmanager
def fused_shapes(convention: str, count: Callable[[float], None]) -> Iterator[None]:
    """Patch torch's attention and ours, and count the FLOPs of each attention by the convention.

    A TorchFunctionMode would not be active inside backward(), where layers are recomputed.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, *_mask: Any, **_kwargs: Any) -> Tensor:
        batch, heads, queries, width = q.shape  # aligned to the end of the keys
        pairs = queries * k.shape[2] - (queries * queries / 2 if convention == "causal" else 0)
        flops = 2 * batch * heads * pairs * (width + v.shape[3])
        return _Attention.apply(q, k, v, lambda times: count(times * flops))

    segment_kernel = _SegmentAttention(convention, count)
    with (
        patch.object(F, "scaled_dot_product_attention", attention),
        patch.object(segment_attention, "kernel_for", lambda *_arguments: segment_kernel),
    ):
        yield
