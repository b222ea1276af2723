"""Triton for embedding: a program takes a stretch of a token's row; on the way back, the first of equal tokens sums."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.embedding.embedding import InOrder

STRETCH = 1024  # channels a program
AT_ONCE = 8  # equal tokens summed in one step, so that a token that fills the chunk does not take forever


@triton.jit
def _gather(tokens_ptr, weight_ptr, out_ptr, first, rows, out_row, C: tl.constexpr, STRETCH: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(tokens_ptr + n).to(tl.int64) - first
    c = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    here = (row >= 0) & (row < rows) & (c < C)
    tl.store(out_ptr + n * out_row + c, tl.load(weight_ptr + row * C + c, mask=here), mask=here)


@triton.jit
def _add(
    dout_ptr,
    tokens_ptr,
    places_ptr,
    ends_ptr,
    dweight_ptr,
    first,
    rows,
    dout_row,
    C: tl.constexpr,
    FRESH: tl.constexpr,
    STRETCH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    n = tl.program_id(0)
    token = tl.load(tokens_ptr + n)
    before = tl.load(tokens_ptr + tl.maximum(n - 1, 0))
    row = token.to(tl.int64) - first
    if ((n == 0) | (token != before)) & (row >= 0) & (row < rows):
        end = tl.load(ends_ptr + n)
        c = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
        inside = c < C
        total = tl.zeros([STRETCH], tl.float32)
        for start in range(n, end, AT_ONCE):
            m = start + tl.arange(0, AT_ONCE)
            place = tl.load(places_ptr + m, mask=m < end, other=0)
            mask = (m < end)[:, None] & inside[None, :]
            slopes = tl.load(dout_ptr + (place * dout_row)[:, None] + c[None, :], mask=mask, other=0.0)
            total += tl.sum(slopes.to(tl.float32), 0)
        if not FRESH:
            total += tl.load(dweight_ptr + row * C + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(dweight_ptr + row * C + c, total.to(dweight_ptr.dtype.element_ty), mask=inside)


def gather_rows_triton_(tokens_N: Tensor, weight_RC: Tensor, first: int, out_NC: Tensor) -> None:
    """As `embedding.gather_rows_reference_`."""
    (n, c), rows = out_NC.shape, len(weight_RC)
    assert weight_RC.is_contiguous(), "rows of the vocabulary lie behind one another"
    assert out_NC.stride(1) == 1, "channels of a row lie side by side"
    if n:
        _gather[(n, triton.cdiv(c, STRETCH))](
            tokens_N, weight_RC, out_NC, first, rows, out_NC.stride(0), C=c, STRETCH=STRETCH
        )


def add_rows_triton_(dout_NC: Tensor, tokens: InOrder, dweight_RC: Tensor, first: int, fresh: bool) -> None:
    """As `embedding.add_rows_reference_`."""
    (n, c), rows = dout_NC.shape, len(dweight_RC)
    assert dweight_RC.is_contiguous(), "rows of the vocabulary lie behind one another"
    assert dout_NC.stride(1) == 1, "channels of a row lie side by side"
    if fresh:
        dweight_RC.zero_()  # also the rows of words that no token names
    if n:
        _add[(n, triton.cdiv(c, STRETCH))](
            dout_NC, *tokens, dweight_RC, first, rows, dout_NC.stride(0),
            C=c, FRESH=fresh, STRETCH=STRETCH, AT_ONCE=AT_ONCE,
        )  # fmt: skip
