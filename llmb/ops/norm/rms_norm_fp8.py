"""RMSNorm straight into fp8: `rms_norm.py` and `quant/fp8_quant.py` in one pass.

    rms_norm_fp8(x_NC, weight_C, eps, scale_amax, rows_NC, columns_CP)

The normed activation is rounded once and is never in memory in a higher precision. The next GEMM takes the rows; the
gradient of its weights takes the columns, which are recomputed in the backward unless they are saved. Shapes as in
both.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.norm.rms_norm import rms_norm
from llmb.ops.quant.fp8_quant import ScaleAmax, quantize_fp8


@op
def rms_norm_fp8(
    x_NC: Tensor,
    weight_C: Tensor,
    eps: float,
    scale_amax: ScaleAmax,
    rows_NC: Tensor | None = None,
    columns_CP: Tensor | None = None,
) -> None:
    """Write weight * x / rms(x) in fp8 to the layouts that are given, and update amax."""
    normed_NC = torch.empty_like(x_NC, dtype=torch.float32)
    rms_norm.reference(x_NC, weight_C, eps, normed_NC)
    quantize_fp8.reference(normed_NC, scale_amax, rows_NC, columns_CP)
