"""A product with another matrix for each run of rows: what a layer of experts computes once its tokens are sorted.

    y_NO = grouped_product(x_NI, weight_EOI, ends_E)      # rows of group e: y = x @ weight[e].T

torch's grouped_mm does all groups in one kernel, and their sizes never leave the device. It needs bf16 and widths that
are multiples of 16 bytes. The sizes of groups are free, because here every operand keeps a row whole in memory, so a
group starts at a multiple of its width in the backward pass too. Everything else takes the loop over groups, which
reads the sizes on the host.

Shapes: N rows of all groups, E groups, I inputs, O outputs. ends_E is int32: the row after each group's last; its own
last is N. A weight wider than x (fp32 beside bf16) is cast when it is used. Its gradient is cast to the format that it
is kept in; where micro-batches add up and there is one already, it is added to that.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.gemm.weight_gradient import settled

ALIGNED = 8  # bf16 values in the 16 bytes that the kernel's loads start at


def grouped_product_reference(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Group by group, in plain torch."""
    return torch.cat([rows @ weight.T for rows, weight in zip(_groups(x_NI, ends_E), weight_EOI, strict=True)])


def grouped_product(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The same in one kernel where there is one, with a backward pass of two more such products."""
    return _GroupedProduct.apply(x_NI, weight_EOI, ends_E)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_EOI, ends_E)
        ctx.weight = weight_EOI  # itself, with the gradient it has; a layer that is computed again saves an alias
        return _times(x_NI, weight_EOI.to(x_NI.dtype).transpose(1, 2), ends_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NI, weight_EOI, ends_E = ctx.saved_tensors
        grad_NO = grad_NO.contiguous()  # the gradient of a sum comes without strides, which the kernel refuses
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x_NI = _times(grad_NO, weight_EOI.to(grad_NO.dtype), ends_E) if wants_x else None
        grad_weight_EOI = settled(ctx.weight, _outer(grad_NO, x_NI, ends_E)) if wants_weight else None
        return grad_x_NI, grad_weight_EOI, None


def _times(x_NI: Tensor, matrix_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Each group's rows times its matrix."""
    if _one_kernel(x_NI, matrix_EIO.shape[-1]):
        return F.grouped_mm(x_NI, matrix_EIO, offs=ends_E)
    return torch.cat([rows @ matrix for rows, matrix in zip(_groups(x_NI, ends_E), matrix_EIO, strict=True)])


def _outer(left_NO: Tensor, right_NI: Tensor, ends_E: Tensor) -> Tensor:
    """The sum over each group's rows of left x right, [E, O, I]."""
    if _one_kernel(left_NO, right_NI.shape[-1]):
        return F.grouped_mm(left_NO.T, right_NI, offs=ends_E)
    pairs = zip(_groups(left_NO, ends_E), _groups(right_NI, ends_E), strict=True)
    return torch.stack([left.T @ right for left, right in pairs])


def _one_kernel(x_NI: Tensor, other_width: int) -> bool:
    aligned = x_NI.shape[1] % ALIGNED == 0 and other_width % ALIGNED == 0
    return x_NI.dtype is torch.bfloat16 and aligned and len(x_NI) > 0


def _groups(x_NI: Tensor, ends_E: Tensor) -> list[Tensor]:
    ends = ends_E.tolist()
    return [x_NI[start:end] for start, end in zip([0, *ends], ends, strict=False)]
