"""Grouped GEMM: a different weight for each group of consecutive rows, as an MoE layer needs for sorted tokens.

    y_NO = grouped_gemm(x_NI, weight_EOI, ends_E)      # rows of group e: y = x @ weight[e].T

    y_NO = add_group_bias(y_NO, bias_EO, ends_E)       # rows of group e: y + bias[e]

torch's grouped_mm computes all groups in one kernel, and their sizes never leave the device. It needs bf16 and widths
that are multiples of 16 bytes. Group sizes are arbitrary, because every operand here is contiguous along its rows, so a
group starts at a multiple of the row width in the backward pass too. Anything else takes a loop over groups, which
reads the sizes on the host.

Shapes: N rows of all groups, E groups, I inputs, O outputs. ends_E is int32, the row after each group's last (`offs` of
grouped_mm). Rows after the last group are padding: they are not computed, and are undefined in y and in the gradient of
x. A weight wider than x (fp32 with bf16) is cast on use. Its gradient is cast to the
dtype of weight gradients; with gradient accumulation it is added to the existing one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.gemm.weight_gradient import accumulate_grad

ALIGNMENT = 8  # bf16 elements in the 16 bytes that the kernel's loads are aligned to


def grouped_gemm_reference(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Compute group by group in plain torch."""
    return _matmul_by_group(x_NI, weight_EOI.transpose(1, 2), ends_E)


def grouped_gemm(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each group's rows by its weight, in one kernel where possible; the backward pass is two more GEMMs."""
    return _GroupedMm.apply(x_NI, weight_EOI, ends_E)


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_EOI, ends_E)
        ctx.weight = weight_EOI  # the parameter with its .grad; activation recomputation saves an alias
        return _matmul(x_NI, weight_EOI.to(x_NI.dtype).transpose(1, 2), ends_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NI, weight_EOI, ends_E = ctx.saved_tensors
        grad_NO = grad_NO.contiguous()  # the gradient of a sum has strides of 0, which the kernel rejects
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x_NI = _matmul(grad_NO, weight_EOI.to(grad_NO.dtype), ends_E) if needs_x else None
        grad_weight_EOI = accumulate_grad(ctx.weight, _outer(grad_NO, x_NI, ends_E)) if needs_weight else None
        return grad_x_NI, grad_weight_EOI, None


def add_group_bias(y_NO: Tensor, bias_EO: Tensor, ends_E: Tensor) -> Tensor:
    """Add its bias to each group's rows."""
    return _GroupBias.apply(y_NO, bias_EO, ends_E)


class _GroupBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NO: Tensor, bias_EO: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        ctx.dtype = bias_EO.dtype
        rows = torch.arange(len(y_NO), dtype=ends_E.dtype, device=y_NO.device)
        group_N = torch.searchsorted(ends_E, rows, right=True).clamp_(max=len(ends_E) - 1)  # padding: any group
        return y_NO + bias_EO.to(y_NO.dtype)[group_N]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor, None]:
        (ends_E,) = ctx.saved_tensors
        grad_NO = grad_NO.contiguous()
        # Sums of rows as a GEMM with ones: of one kernel, in a fixed order, without sizes on the host.
        ones = grad_NO.new_ones(len(grad_NO), ALIGNMENT)
        return grad_NO, _outer(grad_NO, ones, ends_E)[..., 0].to(ctx.dtype), None


def _matmul(x_NI: Tensor, matrix_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each group's rows by its matrix."""
    if _supports_grouped_mm(x_NI, matrix_EIO.shape[-1]):
        return F.grouped_mm(x_NI, matrix_EIO, offs=ends_E)
    return _matmul_by_group(x_NI, matrix_EIO, ends_E)


def _matmul_by_group(x_NI: Tensor, matrix_EIO: Tensor, ends_E: Tensor) -> Tensor:
    out = [rows @ matrix for rows, matrix in zip(_groups(x_NI, ends_E), matrix_EIO, strict=True)]
    padding = x_NI.new_zeros(len(x_NI) - sum(map(len, out)), matrix_EIO.shape[2])
    return torch.cat((*out, padding))


def _outer(left_NO: Tensor, right_NI: Tensor, ends_E: Tensor) -> Tensor:
    """Return left.T @ right of each group's rows, [E, O, I]."""
    if _supports_grouped_mm(left_NO, right_NI.shape[-1]):
        return F.grouped_mm(left_NO.T, right_NI, offs=ends_E)
    pairs = zip(_groups(left_NO, ends_E), _groups(right_NI, ends_E), strict=True)
    return torch.stack([left.T @ right for left, right in pairs])


def _supports_grouped_mm(x_NI: Tensor, right_width: int) -> bool:
    aligned = x_NI.shape[1] % ALIGNMENT == 0 and right_width % ALIGNMENT == 0
    return x_NI.dtype is torch.bfloat16 and aligned and len(x_NI) > 0


def _groups(x_NI: Tensor, ends_E: Tensor) -> list[Tensor]:
    ends = ends_E.tolist()
    return [x_NI[start:end] for start, end in zip([0, *ends], ends, strict=False)]
