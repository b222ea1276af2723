"""The seam between two blocks of a served model: what the first added to the stream, then the norm before the second.

    normed, stream_NC = add_norm(added_NC, stream_NC, weight_C, eps, "rows8")

One pass over memory instead of three: add, norm, round. The sum is kept in the stream's own format.
"""

import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import takes_triton
from llmb.ops.quant.activation_quant import Activation, Form, in_form_reference


def add_norm_reference(
    added_NC: Tensor, stream_NC: Tensor | None, weight_C: Tensor, eps: float, form: Form
) -> tuple[Activation, Tensor]:
    """The normed sum in the form asked for, and the sum."""
    stream_NC = added_NC if stream_NC is None else stream_NC + added_NC
    normed_NC = F.rms_norm(stream_NC, weight_C.shape, weight_C.to(stream_NC.dtype), eps)
    return in_form_reference(normed_NC, form), stream_NC


def add_norm(
    added_NC: Tensor, stream_NC: Tensor | None, weight_C: Tensor, eps: float, form: Form
) -> tuple[Activation, Tensor]:
    """The same in one kernel where there is one. A stream of None: nothing was there before."""
    if takes_triton(added_NC):
        from llmb.ops.norm.add_rms_norm_triton import add_norm_triton

        return add_norm_triton(added_NC, stream_NC, weight_C, eps, form)
    return add_norm_reference(added_NC, stream_NC, weight_C, eps, form)
