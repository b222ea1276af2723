"""Triton kernels of `permute.py`: one program per token, or per block of its channels, with all of its rows.

A row in expert order is whole cache lines wherever it lies, so rows are read and written in token order at no loss, and
whatever belongs to the token itself is loaded once instead of K times.

Pairs are sorted by counting: each block of pairs counts its own experts, a cumulative sum over experts and blocks gives
the offset of each block's pairs, and every pair adds its rank among the pairs of its block with the same expert.
Without atomics, so the sort is stable.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 1024  # per program where a token's channels are split over programs
PER_THREAD = 8  # one 16-byte load in bf16
GRAD_ELEMENTS, GRAD_WARPS = 4096, 4  # a tile of the backward kernel: all rows of a token, some channels
SORT_PAIRS, SORT_COMPARED, SORT_WARPS = 128, 32, 8  # a block of the sort compares all its pairs, so many at a time


@triton.jit
def _permute_kernel(x_ptr, row_map_ptr, rows_ptr, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token, c = _token_and_channels(C, BLOCK)
    x = tl.load(x_ptr + token * C + c, mask=c < C, other=0.0)
    for k in tl.static_range(K):
        row = tl.load(row_map_ptr + token * K + k).to(tl.int64)
        tl.store(rows_ptr + row * C + c, x, mask=(c < C) & (row >= 0))


@triton.jit
def _unpermute_kernel(
    rows_ptr, row_map_ptr, weights_ptr, addend_ptr, out_ptr,
    C: tl.constexpr, K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_ADDEND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, c = _token_and_channels(C, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_map_ptr + token * K + k).to(tl.int64)
        value = tl.load(rows_ptr + row * C + c, mask=(c < C) & (row >= 0), other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        acc += value
    if HAS_ADDEND:
        acc += tl.load(addend_ptr + token * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * C + c, acc.to(out_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def _token_and_channels(C: tl.constexpr, BLOCK: tl.constexpr):
    """Return the token and channels of this program; programs of one token are adjacent."""
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    return (program // blocks).to(tl.int64), (program % blocks) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _unpermute_backward_kernel(
    dout_ptr, rows_ptr, row_map_ptr, weights_ptr, drows_ptr, dweights_ptr,
    C: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of one token in one pass over its channels."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, PADDED_K)
    weight = tl.load(weights_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)[:, None]
    row = tl.load(row_map_ptr + token * K + k, mask=k < K, other=-1).to(tl.int64)[:, None]
    products = tl.zeros((PADDED_K, BLOCK), tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)[None, :]
        mask = (row >= 0) & (c < C)
        # Loaded K times from cache: a single row would go through shared memory to get the layout of the others.
        dout_offsets = tl.broadcast_to(token * C + c, (PADDED_K, BLOCK))
        dout = tl.load(dout_ptr + dout_offsets, mask=mask, other=0.0).to(tl.float32)
        products += dout * tl.load(rows_ptr + row * C + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(drows_ptr + row * C + c, (dout * weight).to(drows_ptr.dtype.element_ty), mask=mask)
    tl.store(dweights_ptr + token * K + k, tl.sum(products, 1).to(dweights_ptr.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _sort_rank_kernel(topk_ids_ptr, ranks_ptr, counts_ptr, pairs, blocks, PAIRS: tl.constexpr, COMPARED: tl.constexpr):
    """Rank each pair among those of its block with the same expert; the last of them stores the count."""
    first = tl.program_id(0) * PAIRS
    pair = first + tl.arange(0, PAIRS)
    expert = _expert_ids(topk_ids_ptr, pair, pairs)
    rank, count = tl.zeros((PAIRS,), tl.int32), tl.zeros((PAIRS,), tl.int32)
    for start in range(0, PAIRS, COMPARED):
        compared = first + start + tl.arange(0, COMPARED)
        same = expert[:, None] == _expert_ids(topk_ids_ptr, compared, pairs)[None, :]
        rank += tl.sum((same & (compared[None, :] < pair[:, None])).to(tl.int32), 1)
        count += tl.sum(same.to(tl.int32), 1)
    tl.store(ranks_ptr + pair, rank, mask=pair < pairs)
    last = (pair < pairs) & (rank == count - 1)
    tl.store(counts_ptr + expert * blocks + tl.program_id(0), count, mask=last)


@triton.jit(do_not_specialize=["pairs", "blocks", "experts"])
def _sort_offset_kernel(
    topk_ids_ptr, row_map_ptr, cumsum_ptr, ends_ptr, pairs, blocks, experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Turn ranks into rows: add the pairs of lower experts and those of the same expert in earlier blocks."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = pair < pairs
    index = _expert_ids(topk_ids_ptr, pair, pairs) * blocks + tl.program_id(0)
    start = tl.load(cumsum_ptr + index - 1, mask=mask & (index > 0), other=0)
    tl.store(row_map_ptr + pair, start + tl.load(row_map_ptr + pair, mask=mask, other=0), mask=mask)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        end = tl.load(cumsum_ptr + expert * blocks + blocks - 1, mask=expert < experts, other=0)
        tl.store(ends_ptr + expert, end, mask=expert < experts)


@triton.jit
def _expert_ids(topk_ids_ptr, pair, pairs):
    """Return the experts of some pairs; -1 beyond the last."""
    return tl.load(topk_ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)


def permute_triton(x_NC: Tensor, row_map_NK: Tensor, rows: int) -> Tensor:
    """See `permute.permute`."""
    (n, k), c = row_map_NK.shape, x_NC.shape[1]
    rows_MC = torch.empty(rows, c, dtype=x_NC.dtype, device=x_NC.device)
    if x_NC.numel():
        block, warps = _block_and_warps(c)
        _permute_kernel[(n * triton.cdiv(c, block),)](
            x_NC.contiguous(), row_map_NK, rows_MC, C=c, K=k, BLOCK=block, num_warps=warps
        )
    return rows_MC


def unpermute_triton(
    rows_MC: Tensor, row_map_NK: Tensor, topk_weights_NK: Tensor | None, addend_NC: Tensor | None
) -> Tensor:
    """See `permute.unpermute`."""
    (n, k), c = row_map_NK.shape, rows_MC.shape[1]
    out_NC = torch.empty(n, c, dtype=rows_MC.dtype, device=rows_MC.device)
    if out_NC.numel():
        block, warps = _block_and_warps(c)
        _unpermute_kernel[(n * triton.cdiv(c, block),)](
            rows_MC.contiguous(), row_map_NK,
            row_map_NK if topk_weights_NK is None else topk_weights_NK.contiguous(),
            out_NC if addend_NC is None else addend_NC.contiguous(), out_NC,
            C=c, K=k, HAS_WEIGHTS=topk_weights_NK is not None, HAS_ADDEND=addend_NC is not None,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out_NC


def unpermute_backward_triton(
    dout_NC: Tensor, rows_MC: Tensor, row_map_NK: Tensor, topk_weights_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """See `permute.unpermute_backward`."""
    (n, k), c = row_map_NK.shape, rows_MC.shape[1]
    drows_MC = torch.empty(rows_MC.shape, dtype=rows_MC.dtype, device=rows_MC.device)
    dweights_NK = torch.empty(n, k, dtype=topk_weights_NK.dtype, device=topk_weights_NK.device)
    if dout_NC.numel():
        padded_k = triton.next_power_of_2(k)
        block = min(max(GRAD_ELEMENTS // padded_k, 1), triton.next_power_of_2(c))
        _unpermute_backward_kernel[(n,)](
            dout_NC.contiguous(), rows_MC.contiguous(), row_map_NK, topk_weights_NK.contiguous(), drows_MC, dweights_NK,
            C=c, K=k, PADDED_K=padded_k, BLOCK=block, num_warps=GRAD_WARPS,
        )  # fmt: skip
    return drows_MC, dweights_NK


def sort_by_expert_triton(topk_ids_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """See `permute.sort_by_expert`."""
    topk_ids_NK, pairs = topk_ids_NK.contiguous(), topk_ids_NK.numel()
    blocks = max(triton.cdiv(pairs, SORT_PAIRS), 1)
    row_map_NK = torch.empty(topk_ids_NK.shape, dtype=torch.int32, device=topk_ids_NK.device)
    counts_EB = torch.zeros(experts, blocks, dtype=torch.int32, device=topk_ids_NK.device)
    ends_E = torch.empty(experts, dtype=torch.int32, device=topk_ids_NK.device)
    _sort_rank_kernel[(blocks,)](
        topk_ids_NK, row_map_NK, counts_EB, pairs, blocks,
        PAIRS=SORT_PAIRS, COMPARED=SORT_COMPARED, num_warps=SORT_WARPS,
    )  # fmt: skip
    cumsum = counts_EB.view(-1).cumsum(0, dtype=torch.int32)
    _sort_offset_kernel[(blocks,)](
        topk_ids_NK, row_map_NK, cumsum, ends_E, pairs, blocks, experts,
        PAIRS=SORT_PAIRS, EXPERTS=triton.next_power_of_2(experts), num_warps=SORT_PAIRS // 32,
    )  # fmt: skip
    return row_map_NK, ends_E


def _block_and_warps(c: int) -> tuple[int, int]:
    """Return the channels of a program and its warps."""
    block = min(CHANNELS, triton.next_power_of_2(c))
    return block, max(block // (32 * PER_THREAD), 1)
