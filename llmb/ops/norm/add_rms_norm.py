"""Residual add fused with the next RMSNorm, in serving.

    normed, residual_NC = add_rms_norm(x_NC, residual_NC, weight_C, eps, "per_token")

One pass over memory instead of three: add, norm, quantize. The sum has the dtype of the residual.
"""

import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.quant.activation_quant import Activation, QuantFormat, quantize_activation


@op
def add_rms_norm(
    x_NC: Tensor, residual_NC: Tensor | None, weight_C: Tensor, eps: float, quant_format: QuantFormat
) -> tuple[Activation, Tensor]:
    """Return rms_norm(residual + x) in a quantization format, and the sum; without a residual the sum is x.

    The kernel writes the sum over `residual_NC`.
    """
    residual_NC = x_NC if residual_NC is None else residual_NC + x_NC
    normed_NC = F.rms_norm(residual_NC, weight_C.shape, weight_C.to(residual_NC.dtype), eps)
    return quantize_activation.reference(normed_NC, quant_format), residual_NC
