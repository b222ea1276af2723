"""Triton for visits to experts: one program takes one token, or a block of its channels, with all of its visits.

A row of the experts' order is whole lines of memory wherever it is, so rows are read and written in the order of the
tokens at no loss, and what belongs to the token itself passes once instead of once a visit.

Visits are sorted by counting: blocks of them count their own experts, a running sum over experts and blocks says where
the visits of each block begin, and every visit adds its number among its block's equals. Nothing is counted with
atomics, so an expert's visits stay in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 1024  # of one program that has a block of a token's channels
PER_THREAD = 8  # one load of 16 bytes in bf16
SLOPES, SLOPE_WARPS = 4096, 4  # numbers that are in work at once for a token's slopes: all visits, some channels
VISITS, COMPARED, VISIT_WARPS = 128, 32, 8  # of a block that is sorted: all pairs are compared, so many at a time


@triton.jit
def _visits_copied(x_ptr, places_ptr, rows_ptr, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token, c = _token_and_channels(C, BLOCK)
    x = tl.load(x_ptr + token * C + c, mask=c < C, other=0.0)
    for k in tl.static_range(K):
        row = tl.load(places_ptr + token * K + k).to(tl.int64)
        tl.store(rows_ptr + row * C + c, x, mask=c < C)


@triton.jit
def _visits_mixed(
    rows_ptr, places_ptr, weights_ptr, beside_ptr, out_ptr,
    C: tl.constexpr, K: tl.constexpr, WEIGHED: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, c = _token_and_channels(C, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(places_ptr + token * K + k).to(tl.int64)
        answer = tl.load(rows_ptr + row * C + c, mask=c < C, other=0.0).to(tl.float32)
        if WEIGHED:
            answer *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        total += answer
    if ADDS:
        total += tl.load(beside_ptr + token * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * C + c, total.to(out_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def _token_and_channels(C: tl.constexpr, BLOCK: tl.constexpr):
    """Whose channels a program takes, and which; programs of one token are neighbours."""
    across: tl.constexpr = (C + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    return (program // across).to(tl.int64), (program % across) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _visits_mixed_backward(
    dout_ptr, rows_ptr, places_ptr, weights_ptr, drows_ptr, dweights_ptr,
    C: tl.constexpr, K: tl.constexpr, WIDE_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All slopes of one token, which is walked over once: products with the rows are added up at the end."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDE_K)
    weight = tl.load(weights_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)[:, None]
    row = tl.load(places_ptr + token * K + k, mask=k < K, other=0).to(tl.int64)[:, None]
    products = tl.zeros((WIDE_K, BLOCK), tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)[None, :]
        there = (k < K)[:, None] & (c < C)
        # Once a visit, from the cache: one row for all would pass through shared memory to lie as the others do.
        own = tl.broadcast_to(token * C + c, (WIDE_K, BLOCK))
        dout = tl.load(dout_ptr + own, mask=there, other=0.0).to(tl.float32)
        products += dout * tl.load(rows_ptr + row * C + c, mask=there, other=0.0).to(tl.float32)
        tl.store(drows_ptr + row * C + c, (dout * weight).to(drows_ptr.dtype.element_ty), mask=there)
    tl.store(dweights_ptr + token * K + k, tl.sum(products, 1).to(dweights_ptr.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["visits", "blocks"])
def _visits_numbered(chosen_ptr, numbers_ptr, counts_ptr, visits, blocks, VISITS: tl.constexpr, COMPARED: tl.constexpr):
    """The number of each visit among those of its block to the same expert; the last of them knows how many."""
    first = tl.program_id(0) * VISITS
    visit = first + tl.arange(0, VISITS)
    expert = _chosen(chosen_ptr, visit, visits)
    number, count = tl.zeros((VISITS,), tl.int32), tl.zeros((VISITS,), tl.int32)
    for start in range(0, VISITS, COMPARED):
        other = first + start + tl.arange(0, COMPARED)
        same = expert[:, None] == _chosen(chosen_ptr, other, visits)[None, :]
        number += tl.sum((same & (other[None, :] < visit[:, None])).to(tl.int32), 1)
        count += tl.sum(same.to(tl.int32), 1)
    tl.store(numbers_ptr + visit, number, mask=visit < visits)
    last = (visit < visits) & (number == count - 1)
    tl.store(counts_ptr + expert * blocks + tl.program_id(0), count, mask=last)


@triton.jit(do_not_specialize=["visits", "blocks", "experts"])
def _visits_placed(
    chosen_ptr, numbers_ptr, until_ptr, ends_ptr, visits, blocks, experts, VISITS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Numbers become places: behind all visits to lower experts, and those of earlier blocks to the same one."""
    visit = tl.program_id(0) * VISITS + tl.arange(0, VISITS)
    there = visit < visits
    place = _chosen(chosen_ptr, visit, visits) * blocks + tl.program_id(0)
    start = tl.load(until_ptr + place - 1, mask=there & (place > 0), other=0)
    tl.store(numbers_ptr + visit, start + tl.load(numbers_ptr + visit, mask=there, other=0), mask=there)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        end = tl.load(until_ptr + expert * blocks + blocks - 1, mask=expert < experts, other=0)
        tl.store(ends_ptr + expert, end, mask=expert < experts)


@triton.jit
def _chosen(chosen_ptr, visit, visits):
    """The experts of some visits; -1 beyond the last."""
    return tl.load(chosen_ptr + visit, mask=visit < visits, other=-1).to(tl.int32)


def copied_triton(x_NC: Tensor, places_NK: Tensor) -> Tensor:
    """As `visits.copied_reference`."""
    (n, k), c = places_NK.shape, x_NC.shape[1]
    rows_MC = torch.empty(n * k, c, dtype=x_NC.dtype, device=x_NC.device)
    if rows_MC.numel():
        block, warps = _block(c)
        _visits_copied[(n * triton.cdiv(c, block),)](
            x_NC.contiguous(), places_NK, rows_MC, C=c, K=k, BLOCK=block, num_warps=warps
        )
    return rows_MC


def mixed_triton(rows_MC: Tensor, places_NK: Tensor, weights_NK: Tensor | None, beside_NC: Tensor | None) -> Tensor:
    """As `visits.mixed_reference`."""
    (n, k), c = places_NK.shape, rows_MC.shape[1]
    out_NC = torch.empty(n, c, dtype=rows_MC.dtype, device=rows_MC.device)
    if out_NC.numel():
        block, warps = _block(c)
        _visits_mixed[(n * triton.cdiv(c, block),)](
            rows_MC.contiguous(), places_NK,
            places_NK if weights_NK is None else weights_NK.contiguous(),
            out_NC if beside_NC is None else beside_NC.contiguous(), out_NC,
            C=c, K=k, WEIGHED=weights_NK is not None, ADDS=beside_NC is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out_NC


def mixed_backward_triton(
    dout_NC: Tensor, rows_MC: Tensor, places_NK: Tensor, weights_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """As `visits.mixed_backward_reference`."""
    (n, k), c = places_NK.shape, rows_MC.shape[1]
    drows_MC = torch.empty(rows_MC.shape, dtype=rows_MC.dtype, device=rows_MC.device)
    dweights_NK = torch.empty(n, k, dtype=weights_NK.dtype, device=weights_NK.device)
    if rows_MC.numel():
        wide_k = triton.next_power_of_2(k)
        block = min(max(SLOPES // wide_k, 1), triton.next_power_of_2(c))
        _visits_mixed_backward[(n,)](
            dout_NC.contiguous(), rows_MC.contiguous(), places_NK, weights_NK.contiguous(), drows_MC, dweights_NK,
            C=c, K=k, WIDE_K=wide_k, BLOCK=block, num_warps=SLOPE_WARPS,
        )  # fmt: skip
    return drows_MC, dweights_NK


def sorted_by_expert_triton(chosen_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """As `visits.sorted_by_expert_reference`."""
    chosen_NK, visits = chosen_NK.contiguous(), chosen_NK.numel()
    blocks = max(triton.cdiv(visits, VISITS), 1)
    places_NK = torch.empty(chosen_NK.shape, dtype=torch.int32, device=chosen_NK.device)
    counts_EB = torch.zeros(experts, blocks, dtype=torch.int32, device=chosen_NK.device)
    ends_E = torch.empty(experts, dtype=torch.int32, device=chosen_NK.device)
    _visits_numbered[(blocks,)](
        chosen_NK, places_NK, counts_EB, visits, blocks, VISITS=VISITS, COMPARED=COMPARED, num_warps=VISIT_WARPS
    )
    until = counts_EB.view(-1).cumsum(0, dtype=torch.int32)
    _visits_placed[(blocks,)](
        chosen_NK, places_NK, until, ends_E, visits, blocks, experts,
        VISITS=VISITS, EXPERTS=triton.next_power_of_2(experts), num_warps=VISITS // 32,
    )  # fmt: skip
    return places_NK, ends_E


def _block(c: int) -> tuple[int, int]:
    """How many channels a program takes, and with how many warps."""
    block = min(CHANNELS, triton.next_power_of_2(c))
    return block, max(block // (32 * PER_THREAD), 1)
