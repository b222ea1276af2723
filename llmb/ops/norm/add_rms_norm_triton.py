"""Triton for add_norm: one program a token, which it holds whole."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import begins, dependent
from llmb.ops.quant.activation_quant import Activation, Form, as_form, room_for
from llmb.ops.quant.activation_quant_triton import store_groups, store_row


@triton.jit
def _add_norm(
    added_ptr,
    stream_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    eps,
    C: tl.constexpr,
    WIDE: tl.constexpr,
    ADDS: tl.constexpr,
    FORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDE)
    inside = c < C
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    begins(DEPENDENT)
    x = tl.load(added_ptr + row * C + c, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADDS:
        x = (x + tl.load(stream_ptr + row * C + c, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(stream_ptr + row * C + c, x, mask=inside)
        x = x.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x) / C + eps) * weight).to(dtype)
    if FORM == "plain":
        tl.store(out_ptr + row * C + c, normed, mask=inside)
    elif FORM == "rows8":
        store_row(normed.to(tl.float32), out_ptr + row * C, scales_ptr + row, c, inside)
    else:
        store_groups(normed.to(tl.float32), out_ptr + row * C, scales_ptr + row * (C // 128), C, WIDE)


def add_norm_triton(
    added_NC: Tensor, stream_NC: Tensor | None, weight_C: Tensor, eps: float, form: Form
) -> tuple[Activation, Tensor]:
    """As `add_norm_reference`, but the sum is written over `stream_NC`."""
    n, c = added_NC.shape
    added_NC = added_NC.contiguous()
    out_NC, scales = room_for(n, c, form, added_NC)
    stream = added_NC if stream_NC is None else stream_NC
    wide = triton.next_power_of_2(c)
    if n:
        _add_norm[(n,)](
            added_NC, stream, weight_C, out_NC, scales, eps,
            C=c, WIDE=wide, ADDS=stream_NC is not None, FORM=form, num_warps=min(max(wide // 512, 1), 16),
            **dependent(n),
        )  # fmt: skip
    return as_form(out_NC, scales, form), stream
