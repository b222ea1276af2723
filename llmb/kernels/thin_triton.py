"""Triton for linear layers of a handful of tokens: a program sums a few rows of the weight over all inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.kernels.dependent_launch import begins, dependent
from llmb.kernels.forms import Rows8

ROWS, STEP = 4, 1024  # of the weight that a program holds at a time
WARPS = 4


@triton.jit
def _thin(
    x_ptr,
    weight_ptr,
    scales_ptr,
    x_scales_ptr,
    out_ptr,
    O,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SCALED: tl.constexpr,
    X_SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, STEP)
    rows = weight_ptr + r.to(tl.int64)[:, None] * K
    there = (r < O)[:, None]
    first = tl.load(rows + k[None, :], mask=there & (k < K)[None, :], other=0.0)
    begins(DEPENDENT)  # the weight's first piece is on its way before the input is there
    for n in tl.static_range(N):
        x = tl.load(x_ptr + n * K + k, mask=k < K, other=0.0).to(tl.float32)
        total = tl.sum(first.to(tl.float32) * x[None, :], 1)
        for begin in range(STEP, K, STEP):
            inside = begin + k < K
            weight = tl.load(rows + (begin + k)[None, :], mask=there & inside[None, :], other=0.0)
            x = tl.load(x_ptr + n * K + begin + k, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(weight.to(tl.float32) * x[None, :], 1)
        if SCALED:
            total *= tl.load(scales_ptr + r, mask=r < O, other=0.0)
        if X_SCALED:
            total *= tl.load(x_scales_ptr + n)
        tl.store(out_ptr + n * O + r, total.to(out_ptr.dtype.element_ty), mask=r < O)


def thin_product_triton(x: Tensor | Rows8, weight_OK: Tensor, scales_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `thin_product_reference`."""
    x_NK, x_scales = (x.contiguous(), None) if isinstance(x, Tensor) else x
    (n, k), o = x_NK.shape, weight_OK.shape[0]
    out_NO = torch.empty(n, o, dtype=dtype, device=x_NK.device)
    _thin[(triton.cdiv(o, ROWS),)](
        x_NK, weight_OK, scales_O, x_scales, out_NO, o, N=n, K=k, ROWS=ROWS, STEP=STEP,
        SCALED=scales_O is not None, X_SCALED=x_scales is not None, num_warps=WARPS, **dependent(n),
    )  # fmt: skip
    return out_NO
