"""Triton for the gated product: one program a token, which it holds whole."""

import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import begins, dependent
from llmb.ops.quant.activation_quant import GROUP, Activation, Form, as_form, room_for
from llmb.ops.quant.activation_quant_triton import store_groups, store_row


@triton.jit
def activated(gate, SILU: tl.constexpr):
    """silu, or gelu's tanh form: tanh(y) = 2 * sigmoid(2 y) - 1."""
    if SILU:
        return gate * tl.sigmoid(gate)
    else:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def _gated(
    both_ptr,
    out_ptr,
    scales_ptr,
    F: tl.constexpr,
    WIDE: tl.constexpr,
    SILU: tl.constexpr,
    FORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    begins(DEPENDENT)
    gate_row(tl.program_id(0).to(tl.int64), both_ptr, out_ptr, scales_ptr, F, WIDE, SILU, FORM)


@triton.jit
def gate_row(
    row, both_ptr, out_ptr, scales_ptr, F: tl.constexpr, WIDE: tl.constexpr, SILU: tl.constexpr, FORM: tl.constexpr
):
    """One row, for any kernel that knows which."""
    f = tl.arange(0, WIDE)
    inside = f < F
    gate = tl.load(both_ptr + row * 2 * F + f, mask=inside, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(both_ptr + row * 2 * F + F + f, mask=inside, other=0.0).to(tl.float32)
    active = activated(gate, SILU)
    mixed = (active.to(dtype).to(tl.float32) * up).to(dtype)
    if FORM == "plain":
        tl.store(out_ptr + row * F + f, mixed, mask=inside)
    elif FORM == "rows8":
        store_row(mixed.to(tl.float32), out_ptr + row * F, scales_ptr + row, f, inside)
    else:
        store_groups(mixed.to(tl.float32), out_ptr + row * F, scales_ptr + row * (F // 128), F, WIDE)


def gated_triton(both_N2F: Tensor, activation: str, form: Form) -> Activation:
    """As `gated_reference`."""
    n, f = both_N2F.shape[0], both_N2F.shape[1] // 2
    out_NF, scales = room_for(n, f, form, both_N2F)
    wide = max(triton.next_power_of_2(f), GROUP)
    if n:
        _gated[(n,)](
            both_N2F.contiguous(), out_NF, scales,
            F=f, WIDE=wide, SILU=activation == "silu", FORM=form, num_warps=min(max(wide // 1024, 1), 16),
            **dependent(n),
        )  # fmt: skip
    return as_form(out_NF, scales, form)
