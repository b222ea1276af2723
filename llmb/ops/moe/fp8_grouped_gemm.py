"""The experts' products in 8 bits: `grouped_gemm.py` with operands as `group_quant.py` makes them.

    y_NO = fp8_grouped_product(x_NI, weight_EOI, ends_E)      # rows of group e: y = x @ weight[e].T

On a GPU each of the three products is one kernel for all groups, `torch._scaled_grouped_mm`, and their sizes never
leave the device. It runs on Hopper only, takes e4m3 only, and gives bf16: a gradient that is wanted in fp32 is widened
afterwards, and has lost much less by that than by its 8-bit operands. Anywhere else the same arithmetic is done on the
same 8-bit values in fp32.

    y  = x @ weight.T    rows of x     with rows of the weight       a scale for each row, and for each output
    dx = dy @ weight     rows of dy    with columns of the weight    a scale for each row, and for each input
    dw = dy.T @ x        columns of dy with columns of x             a scale for each output and input of a group

The forward product adds with fewer bits, which is faster; the backward ones only where that is asked for.

Shapes: N rows of all groups, E groups, I inputs, O outputs, P places of columns.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from llmb.ops.dispatch import on_gpu
from llmb.ops.gemm.fp8_linear import rounded
from llmb.ops.gemm.weight_gradient import settled
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.group_quant import GroupForms, Groups, WeightForms, groups_of, in_groups, weight_in_groups

OUT = torch.bfloat16  # of the hardware's grouped products

_already_cast = WeakIdKeyDictionary()  # rows that are still alive -> (version, is recorded, ends_E, Groups, GroupForms)


def fp8_grouped_product(
    x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, kept: WeightForms | None = None, fast_sums: bool = False
) -> Tensor:
    """Each group's rows times its weight with 8-bit operands; inputs and outputs must be multiples of 16.

    A weight that stays where it is may have forms that are kept from one call to the next.
    """
    return _Fp8GroupedProduct.apply(x_NI, weight_EOI, *_rows_in_fp8(x_NI, ends_E), kept, fast_sums)


def _rows_in_fp8(x_NI: Tensor, ends_E: Tensor) -> tuple[Groups, GroupForms]:
    """Cast once for all layers that read the same rows, as gate and up do."""
    recorded = _is_recorded(x_NI)
    version, was_recorded, ends, groups, made = _already_cast.get(x_NI, (None, None, None, None, None))
    if (version, was_recorded) != (x_NI._version, recorded) or ends is not ends_E:
        with torch.no_grad():
            groups = groups_of(ends_E, len(x_NI))
            made = in_groups(x_NI, groups, rows=True, columns=True)
        _already_cast[x_NI] = (x_NI._version, recorded, ends_E, groups, made)
    return groups, made


class _Fp8GroupedProduct(torch.autograd.Function):
    """Keeps the rows in 8 bits for the backward pass, as columns."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_EOI: Tensor, groups: Groups, x8: GroupForms, kept: WeightForms | None,
        fast_sums: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x8.columns, x8.column_scales, weight_EOI, *groups)
        ctx.kept, ctx.weight, ctx.fast_sums = kept, weight_EOI, fast_sums  # itself, with the gradient it has
        if kept is None:
            w8 = weight_in_groups(weight_EOI.to(x_NI.dtype), rows=True)
        else:
            w8 = kept.of(weight_EOI, x_NI.dtype, anew=_is_recorded(weight_EOI))
        return _times(x8, _matrices(w8.rows, w8.row_scales, weight_EOI), groups.ends_E, fast=True).to(x_NI.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x_columns_IP, x_scales_EI, weight_EOI, *found = ctx.saved_tensors
        groups, (wants_x, wants_weight) = Groups(*found), ctx.needs_input_grad[:2]
        g8 = in_groups(grad_NO, groups, rows=wants_x, columns=wants_weight)
        grad_x_NI = grad_weight_EOI = None
        if wants_x:
            if ctx.kept is None:
                w8 = weight_in_groups(weight_EOI.to(grad_NO.dtype), columns=True)
            else:
                w8 = ctx.kept.of(weight_EOI, grad_NO.dtype)
            columns = (w8.columns, w8.column_scales)
            grad_x_NI = _times(g8, columns, groups.ends_E, fast=ctx.fast_sums).to(grad_NO.dtype)
            del w8, columns
        if wants_weight:
            left, right = (g8.columns, g8.column_scales), (x_columns_IP, x_scales_EI)
            grad_weight_EOI = settled(ctx.weight, _outer(left, right, groups.places_E, fast=ctx.fast_sums))
        return grad_x_NI, grad_weight_EOI, None, None, None, None


def _is_recorded(tensor: Tensor) -> bool:
    """Whether what is done now goes into a CUDA graph, whose replays will find other values here."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


Scaled = tuple[Any, Any]  # 8-bit values and their scales


def _matrices(rows: Any, scales: Any, weight_EOI: Tensor) -> Scaled:
    """A weight's rows, matrix by matrix."""
    return rows.view(weight_EOI.shape), scales.view(weight_EOI.shape[:2])


def _times(left: GroupForms, right: Scaled, ends_E: Tensor, fast: bool) -> Tensor:
    """Each group's rows times the rows of its matrix, [N, M]; `fast` lets the GPU add with fewer bits."""
    rows_NK, scales_N = left.rows, left.row_scales
    matrices_EMK, scales_EM = right
    assert rows_NK is not None
    assert scales_N is not None
    if on_gpu(rows_NK):
        return torch._scaled_grouped_mm(
            rows_NK, matrices_EMK.transpose(1, 2), scales_N, scales_EM, ends_E, out_dtype=OUT, use_fast_accum=fast
        )
    made = rows_NK.new_empty(len(rows_NK), matrices_EMK.shape[1], dtype=OUT)
    for group, (start, end) in enumerate(pairwise([0, *ends_E.tolist()])):
        sums = rows_NK[start:end].float() @ matrices_EMK[group].float().T
        made[start:end] = sums * scales_N[start:end, None] * scales_EM[group]
    return made


def _outer(left: Scaled, right: Scaled, places_E: Tensor, fast: bool) -> Tensor:
    """The sum over each group's places of left x right, [E, A, B]; `fast` as before."""
    (left_AP, scales_EA), (right_BP, scales_EB) = left, right
    if on_gpu(left_AP):
        return torch._scaled_grouped_mm(
            left_AP, right_BP.T, scales_EA.flatten(), scales_EB.flatten(), places_E, out_dtype=OUT, use_fast_accum=fast
        )
    made = left_AP.new_empty(len(places_E), len(left_AP), len(right_BP), dtype=OUT)
    for group, (start, end) in enumerate(pairwise([0, *places_E.tolist()])):
        sums = left_AP[:, start:end].float() @ right_BP[:, start:end].float().T
        made[group] = sums * scales_EA[group, :, None] * scales_EB[group]
    return made


def fp8_grouped_product_reference(
    x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, grad_NO: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output and both gradients, group by group, with the rounding spelled out and no 8-bit type in sight."""
    out_NO, grad_x_NI = torch.empty_like(grad_NO), torch.empty_like(x_NI)
    grad_weight_EOI = torch.zeros_like(weight_EOI)
    for group, (start, end) in enumerate(pairwise([0, *ends_E.tolist()])):
        if start == end:
            continue
        x, weight, grad = x_NI[start:end], weight_EOI[group].to(x_NI.dtype), grad_NO[start:end]
        out_NO[start:end] = _rounded_product(x, weight.T).to(OUT)
        grad_x_NI[start:end] = _rounded_product(grad, weight).to(OUT)
        grad_weight_EOI[group] = _rounded_product(grad.T, x).to(OUT)
    return out_NO, grad_x_NI, grad_weight_EOI


def _rounded_product(left_AK: Tensor, right_KB: Tensor) -> Tensor:
    """With a scale for each row on the left and each column on the right."""
    (left, left_scales), (right, right_scales) = rounded(left_AK, E4M3, dim=1), rounded(right_KB, E4M3, dim=0)
    return (left @ right) * left_scales * right_scales
