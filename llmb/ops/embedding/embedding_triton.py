"""Triton kernels of the embedding: a program takes a block of a row; backward, that of the first equal token sums."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.embedding.embedding import SortedTokens

BLOCK_C = 1024  # channels of a program
BLOCK_N = 8  # equal tokens summed in one iteration, so that a token that fills the chunk does not take too long


@triton.jit
def _embedding_gather(tokens_ptr, weight_ptr, out_ptr, first, rows, out_stride, C: tl.constexpr, BLOCK_C: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(tokens_ptr + n).to(tl.int64) - first
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row >= 0) & (row < rows) & (c < C)
    tl.store(out_ptr + n * out_stride + c, tl.load(weight_ptr + row * C + c, mask=mask), mask=mask)


@triton.jit
def _embedding_backward(
    dout_ptr,
    tokens_ptr,
    index_ptr,
    ends_ptr,
    dweight_ptr,
    first,
    rows,
    dout_stride,
    C: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0)
    token = tl.load(tokens_ptr + n)
    previous = tl.load(tokens_ptr + tl.maximum(n - 1, 0))
    row = token.to(tl.int64) - first
    if ((n == 0) | (token != previous)) & (row >= 0) & (row < rows):
        end = tl.load(ends_ptr + n)
        c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        channel_mask = c < C
        total = tl.zeros([BLOCK_C], tl.float32)
        for start in range(n, end, BLOCK_N):
            m = start + tl.arange(0, BLOCK_N)
            index = tl.load(index_ptr + m, mask=m < end, other=0)
            mask = (m < end)[:, None] & channel_mask[None, :]
            dout = tl.load(dout_ptr + (index * dout_stride)[:, None] + c[None, :], mask=mask, other=0.0)
            total += tl.sum(dout.to(tl.float32), 0)
        if ACCUMULATE:
            total += tl.load(dweight_ptr + row * C + c, mask=channel_mask, other=0.0).to(tl.float32)
        tl.store(dweight_ptr + row * C + c, total.to(dweight_ptr.dtype.element_ty), mask=channel_mask)


def embedding_gather_triton_(tokens_N: Tensor, weight_RC: Tensor, first: int, out_NC: Tensor) -> None:
    """Launch the kernel of `embedding.embedding_gather_`."""
    (n, c), rows = out_NC.shape, len(weight_RC)
    assert weight_RC.is_contiguous(), "weight must be contiguous"
    assert out_NC.stride(1) == 1, "channels must be contiguous"
    if n:
        _embedding_gather[(n, triton.cdiv(c, BLOCK_C))](
            tokens_N, weight_RC, out_NC, first, rows, out_NC.stride(0), C=c, BLOCK_C=BLOCK_C
        )


def embedding_backward_triton_(
    dout_NC: Tensor, tokens: SortedTokens, dweight_RC: Tensor, first: int, accumulate: bool
) -> None:
    """Launch the kernel of `embedding.embedding_backward_`."""
    (n, c), rows = dout_NC.shape, len(dweight_RC)
    assert dweight_RC.is_contiguous(), "dweight must be contiguous"
    assert dout_NC.stride(1) == 1, "channels must be contiguous"
    if not accumulate:
        dweight_RC.zero_()  # also the rows of tokens that do not occur
    if n:
        _embedding_backward[(n, triton.cdiv(c, BLOCK_C))](
            dout_NC, *tokens, dweight_RC, first, rows, dout_NC.stride(0),
            C=c, ACCUMULATE=accumulate, BLOCK_C=BLOCK_C, BLOCK_N=BLOCK_N,
        )  # fmt: skip
