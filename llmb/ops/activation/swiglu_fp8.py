"""The gated activation and its way back straight into 8 bits: `swiglu.py` and `fp8_quant.py` in one pass.

    swiglu_fp8(h_N2F, gauge, rows_NF, columns_FP)
    swiglu_backward_fp8(dact_NF, h_N2F, slope_gauge, slope_rows_N2F, slope_columns_2FP, act_gauge, act_columns_FP)

What comes in is left as it is. The way back gives the slopes of gate and up, one tensor with one scale, for the
products behind it, and the activation, which nobody kept, for the gradient of the next matrix. Shapes as in both.
"""

import torch
from torch import Tensor

from llmb.ops.activation.swiglu import swiglu_backward_reference, swiglu_reference
from llmb.ops.dispatch import takes_triton
from llmb.ops.quant.fp8_quant import Gauge, cast_both_reference


def swiglu_fp8(h_N2F: Tensor, gauge: Gauge, rows_NF: Tensor | None = None, columns_FP: Tensor | None = None) -> None:
    """silu(gate) * up in 8 bits, gate first, in the forms that are given."""
    if takes_triton(h_N2F):
        from llmb.ops.activation.swiglu_fp8_triton import swiglu_fp8_triton

        swiglu_fp8_triton(h_N2F, gauge, rows_NF, columns_FP)
    else:
        swiglu_fp8_reference(h_N2F, gauge, rows_NF, columns_FP)


def swiglu_fp8_reference(
    h_N2F: Tensor, gauge: Gauge, rows_NF: Tensor | None = None, columns_FP: Tensor | None = None
) -> None:
    """The same in plain torch."""
    act_NF = torch.empty(len(h_N2F), h_N2F.shape[1] // 2, device=h_N2F.device)
    swiglu_reference(h_N2F, act_NF)
    cast_both_reference(act_NF, gauge, rows_NF, columns_FP)


def swiglu_backward_fp8(
    dact_NF: Tensor,
    h_N2F: Tensor,
    slope_gauge: Gauge,
    slope_rows_N2F: Tensor | None,
    slope_columns_2FP: Tensor | None,
    act_gauge: Gauge,
    act_columns_FP: Tensor | None,
) -> None:
    """The slope of h in both forms, and the activation in columns. All are given, or none: then only their sizes are
    found."""
    if takes_triton(h_N2F):
        from llmb.ops.activation.swiglu_fp8_triton import swiglu_backward_fp8_triton as backward
    else:
        backward = swiglu_backward_fp8_reference
    backward(dact_NF, h_N2F, slope_gauge, slope_rows_N2F, slope_columns_2FP, act_gauge, act_columns_FP)


def swiglu_backward_fp8_reference(
    dact_NF: Tensor,
    h_N2F: Tensor,
    slope_gauge: Gauge,
    slope_rows_N2F: Tensor | None,
    slope_columns_2FP: Tensor | None,
    act_gauge: Gauge,
    act_columns_FP: Tensor | None,
) -> None:
    """The same in plain torch."""
    act_NF, slope_N2F = dact_NF.to(torch.float32, copy=True), h_N2F.to(torch.float32, copy=True)
    swiglu_backward_reference(act_NF, slope_N2F)
    cast_both_reference(slope_N2F, slope_gauge, slope_rows_N2F, slope_columns_2FP)
    cast_both_reference(act_NF, act_gauge, None, act_columns_FP)
