"""FP8 grouped GEMM: `grouped_gemm.py` with operands quantized as in `group_quant.py`.

    y_NO = fp8_grouped_gemm(x_NI, weight_EOI, ends_E)      # rows of group e: y = x @ weight[e].T

On a GPU each of the three GEMMs is one kernel for all groups, `torch._scaled_grouped_mm`, and their sizes never leave
the device. It runs on Hopper only, takes e4m3 only, and outputs bf16: a gradient required in fp32 is cast afterwards,
and has lost much less by that than by its FP8 operands. Anywhere else the same arithmetic is done in fp32 on the same
FP8 values.

    y  = x @ weight.T    rows of x     with rows of the weight       a scale per row, and per output
    dx = dy @ weight     rows of dy    with columns of the weight    a scale per row, and per input
    dw = dy.T @ x        columns of dy with columns of x             a scale per output and input of a group

The forward GEMM uses fast accumulation; the backward ones only with `fp8_fast_accum`.

Shapes: N rows of all groups, E groups, I inputs, O outputs, P padded rows of column-major operands.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from llmb.ops.dispatch import on_gpu
from llmb.ops.gemm.weight_gradient import accumulate_grad
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import fake_quantize
from llmb.ops.quant.group_quant import (
    Fp8WeightCache,
    GroupedFp8,
    GroupOffsets,
    group_offsets,
    quantize_expert_weights,
    quantize_groups,
)

OUT_DTYPE = torch.bfloat16  # of torch._scaled_grouped_mm

# Live rows -> (version, whether captured in a graph, ends_E, GroupOffsets, GroupedFp8).
_quantized_rows = WeakIdKeyDictionary()
_offsets = WeakIdKeyDictionary()  # live ends_E -> ((version, whether captured in a graph, rows), the other offsets)


def fp8_grouped_gemm(
    x_NI: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    weight_cache: Fp8WeightCache | None = None,
    fp8_fast_accum: bool = False,
) -> Tensor:
    """Multiply each group's rows by its weight in FP8; inputs and outputs must be multiples of 16.

    The quantized copies of a weight that stays at its address may be cached from one call to the next.
    """
    return _Fp8GroupedMm.apply(x_NI, weight_EOI, *_quantize_rows(x_NI, ends_E), weight_cache, fp8_fast_accum)


def _quantize_rows(x_NI: Tensor, ends_E: Tensor) -> tuple[GroupOffsets, GroupedFp8]:
    """Quantize once for all layers that read the same rows, as gate and up do."""
    capturing = _is_capturing(x_NI)
    version, captured, ends, groups, x8 = _quantized_rows.get(x_NI, (None, None, None, None, None))
    if (version, captured) != (x_NI._version, capturing) or ends is not ends_E:
        with torch.no_grad():
            groups = _group_offsets(ends_E, len(x_NI))
            x8 = quantize_groups(x_NI, groups, rows=True, columns=True)
        _quantized_rows[x_NI] = (x_NI._version, capturing, ends_E, groups, x8)
    return groups, x8


def _group_offsets(ends_E: Tensor, rows: int) -> GroupOffsets:
    """Compute them once for all layers of the same experts: twenty small kernels."""
    key = ends_E._version, _is_capturing(ends_E), rows
    cached_key, offsets = _offsets.get(ends_E, (None, ()))
    if cached_key != key:
        _, *offsets = group_offsets(ends_E, rows)
        _offsets[ends_E] = key, offsets  # without ends_E, which would keep itself alive
    return GroupOffsets(ends_E, *offsets)


class _Fp8GroupedMm(torch.autograd.Function):
    """Saves the FP8 columns of x for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_EOI: Tensor, groups: GroupOffsets, x8: GroupedFp8,
        weight_cache: Fp8WeightCache | None, fp8_fast_accum: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x8.columns, x8.column_scales, weight_EOI, *groups)
        ctx.weight_cache, ctx.fp8_fast_accum = weight_cache, fp8_fast_accum
        ctx.weight = weight_EOI  # the parameter with its .grad
        if weight_cache is None:
            w8 = quantize_expert_weights(weight_EOI.to(x_NI.dtype), rows=True)
        else:
            w8 = weight_cache.get(weight_EOI, x_NI.dtype, force=_is_capturing(weight_EOI))
        return _matmul(x8, _per_group(w8.rows, w8.row_scales, weight_EOI), groups.ends_E, fast=True).to(x_NI.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x_columns_IP, x_scales_EI, weight_EOI, *offsets = ctx.saved_tensors
        groups, (needs_x, needs_weight) = GroupOffsets(*offsets), ctx.needs_input_grad[:2]
        g8 = quantize_groups(grad_NO, groups, rows=needs_x, columns=needs_weight)
        grad_x_NI = grad_weight_EOI = None
        if needs_x:
            if ctx.weight_cache is None:
                w8 = quantize_expert_weights(weight_EOI.to(grad_NO.dtype), columns=True)
            else:
                w8 = ctx.weight_cache.get(weight_EOI, grad_NO.dtype)
            columns = (w8.columns, w8.column_scales)
            grad_x_NI = _matmul(g8, columns, groups.ends_E, fast=ctx.fp8_fast_accum).to(grad_NO.dtype)
            del w8, columns
        if needs_weight:
            left, right = (g8.columns, g8.column_scales), (x_columns_IP, x_scales_EI)
            grad_weight_EOI = accumulate_grad(
                ctx.weight, _outer(left, right, groups.padded_ends_E, fast=ctx.fp8_fast_accum)
            )
        return grad_x_NI, grad_weight_EOI, None, None, None, None


def _is_capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, whose replays will find other values in this tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


ScaledValues = tuple[Any, Any]  # FP8 values and their scales


def _per_group(rows: Any, scales: Any, weight_EOI: Tensor) -> ScaledValues:
    """View a weight's rows as one matrix per group."""
    return rows.view(weight_EOI.shape), scales.view(weight_EOI.shape[:2])


def _matmul(left: GroupedFp8, right: ScaledValues, ends_E: Tensor, fast: bool) -> Tensor:
    """Multiply each group's rows by the rows of its matrix, [N, M]; `fast` allows fast accumulation."""
    rows_NK, scales_N = left.rows, left.row_scales
    matrices_EMK, scales_EM = right
    assert rows_NK is not None
    assert scales_N is not None
    if on_gpu(rows_NK):
        return torch._scaled_grouped_mm(
            rows_NK, matrices_EMK.transpose(1, 2), scales_N, scales_EM, ends_E, out_dtype=OUT_DTYPE, use_fast_accum=fast
        )
    out_NM = rows_NK.new_empty(len(rows_NK), matrices_EMK.shape[1], dtype=OUT_DTYPE)
    for group, (start, end) in enumerate(pairwise([0, *ends_E.tolist()])):
        acc = rows_NK[start:end].float() @ matrices_EMK[group].float().T
        out_NM[start:end] = acc * scales_N[start:end, None] * scales_EM[group]
    return out_NM


def _outer(left: ScaledValues, right: ScaledValues, padded_ends_E: Tensor, fast: bool) -> Tensor:
    """Return left @ right.T over each group's padded rows, [E, A, B]; `fast` as before."""
    (left_AP, scales_EA), (right_BP, scales_EB) = left, right
    if on_gpu(left_AP):
        return torch._scaled_grouped_mm(
            left_AP, right_BP.T, scales_EA.flatten(), scales_EB.flatten(), padded_ends_E,
            out_dtype=OUT_DTYPE, use_fast_accum=fast,
        )  # fmt: skip
    out_EAB = left_AP.new_empty(len(padded_ends_E), len(left_AP), len(right_BP), dtype=OUT_DTYPE)
    for group, (start, end) in enumerate(pairwise([0, *padded_ends_E.tolist()])):
        acc = left_AP[:, start:end].float() @ right_BP[:, start:end].float().T
        out_EAB[group] = acc * scales_EA[group, :, None] * scales_EB[group]
    return out_EAB


def fp8_grouped_gemm_reference(
    x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, grad_NO: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and both gradients, computed group by group with fake quantization."""
    out_NO, grad_x_NI = torch.empty_like(grad_NO), torch.empty_like(x_NI)
    grad_weight_EOI = torch.zeros_like(weight_EOI)
    for group, (start, end) in enumerate(pairwise([0, *ends_E.tolist()])):
        if start == end:
            continue
        x, weight, grad = x_NI[start:end], weight_EOI[group].to(x_NI.dtype), grad_NO[start:end]
        out_NO[start:end] = _fake_quantized_matmul(x, weight.T).to(OUT_DTYPE)
        grad_x_NI[start:end] = _fake_quantized_matmul(grad, weight).to(OUT_DTYPE)
        grad_weight_EOI[group] = _fake_quantized_matmul(grad.T, x).to(OUT_DTYPE)
    return out_NO, grad_x_NI, grad_weight_EOI


def _fake_quantized_matmul(left_AK: Tensor, right_KB: Tensor) -> Tensor:
    """Multiply with one scale per row on the left and per column on the right."""
    left, left_scales = fake_quantize(left_AK, E4M3, dim=1)
    right, right_scales = fake_quantize(right_KB, E4M3, dim=0)
    return (left @ right) * left_scales * right_scales
