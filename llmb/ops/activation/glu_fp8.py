"""SwiGLU or GeGLU and its backward straight into fp8: `activation.glu` and `quant/fp8_quant.py` in one pass.

    glu_fp8(h_N2F, "silu", scale_amax, rows_NF, columns_FP)
    glu_backward_fp8(
        dact_NF, h_N2F, "silu", dh_scale_amax, dh_rows_N2F, dh_columns_2FP, act_scale_amax, act_columns_FP
    )

Inputs are left unchanged. The backward gives the gradients of gate and up, one tensor with one scale, for the GEMMs
behind it, and the recomputed activation for the gradient of the next weight. Shapes as in both.
"""

import torch
from torch import Tensor

from llmb.ops.activation.activation import activation_backward, activation_forward
from llmb.ops.dispatch import op
from llmb.ops.quant.fp8_quant import ScaleAmax, quantize_fp8


@op
def glu_fp8(
    h_N2F: Tensor,
    activation: str,
    scale_amax: ScaleAmax,
    rows_NF: Tensor | None = None,
    columns_FP: Tensor | None = None,
) -> None:
    """Write activation(gate) * up in fp8, gate first, to the layouts that are given, and update amax."""
    gate_NF, up_NF = h_N2F.float().chunk(2, dim=-1)
    act_NF = activation_forward.reference(gate_NF, activation, up_NF)
    quantize_fp8.reference(act_NF, scale_amax, rows_NF, columns_FP)


@op
def glu_backward_fp8(
    dact_NF: Tensor,
    h_N2F: Tensor,
    activation: str,
    dh_scale_amax: ScaleAmax,
    dh_rows_N2F: Tensor | None,
    dh_columns_2FP: Tensor | None,
    act_scale_amax: ScaleAmax,
    act_columns_FP: Tensor | None,
) -> None:
    """Write the gradient of h in both layouts and the activation in columns; without any, only update amax of both.

    Either all outputs are given or none.
    """
    act_NF, dh_N2F = dact_NF.to(torch.float32, copy=True), h_N2F.to(torch.float32, copy=True)
    gate_NF, up_NF = dh_N2F.chunk(2, dim=-1)
    activation_backward.reference(act_NF, gate_NF, activation, up_NF, (gate_NF, up_NF), recompute=True)
    quantize_fp8.reference(dh_N2F, dh_scale_amax, dh_rows_N2F, dh_columns_2FP)
    quantize_fp8.reference(act_NF, act_scale_amax, None, act_columns_FP)
