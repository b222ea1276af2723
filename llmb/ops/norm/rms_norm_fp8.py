"""The norm before a block straight into 8 bits: `rms_norm.py` and `fp8_quant.py` in one pass.

    rms_norm_fp8(x_NC, weight_C, eps, gauge, rows_NC, columns_CP)

The normed stream is rounded once and is never in memory in a wider format. Rows are what the block's product takes;
columns are what the gradient of its weights takes, and are made again on the way back unless they are kept. Shapes as
in both.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton
from llmb.ops.norm.rms_norm import rms_norm_reference
from llmb.ops.quant.fp8_quant import Gauge, cast_both_reference


def rms_norm_fp8(
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    gauge: Gauge,
    rows_NC: Tensor | None = None,
    columns_CP: Tensor | None = None,
) -> None:
    """weight * x / rms(x) in 8 bits, in the forms that are given."""
    if takes_triton(x_NC):
        from llmb.ops.norm.rms_norm_fp8_triton import rms_norm_fp8_triton

        rms_norm_fp8_triton(x_NC, weight_C, eps, gauge, rows_NC, columns_CP)
    else:
        rms_norm_fp8_reference(x_NC, weight_C, eps, gauge, rows_NC, columns_CP)


def rms_norm_fp8_reference(
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    gauge: Gauge,
    rows_NC: Tensor | None = None,
    columns_CP: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    normed_NC = torch.empty_like(x_NC, dtype=torch.float32)
    rms_norm_reference(x_NC, weight_C, eps, normed_NC)
    cast_both_reference(normed_NC, gauge, rows_NC, columns_CP)
