"""Mamba-2 decode step as two Triton kernels; `selective_state_update.py` defines what they compute.

Nearly all of the time goes to reading and writing the states, once. The convolution has its own kernel, because all
heads of a group read its output for the group while its state is shifted. A program has one row and some of its
channels, or some rows of one head's state: enough programs for a small batch to fill a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.mamba.selective_state_update import MambaState, MambaWeights, StateRows

BLOCK_CHANNELS = 256
BLOCK_HEAD_DIM = 32  # rows of a head's state per program, with all columns
# Slices of a step's input buffer, at any alignment: no recompilation for it.
UNALIGNED = ("state_indices", "positions", "seq_lens")


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _conv_update_kernel(
    x, weight, bias, conv_state, out, state_indices, positions, seq_lens, x_row, x_group, width,
    KERNEL_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the convolution and SiLU of one row and shift its conv state by one token."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(seq_lens + row) == 0:
        return
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < width
    has_past = mask & (tl.load(positions + row) != 0)
    conv_state += tl.load(state_indices + row) * (KERNEL_SIZE - 1) * width + channels
    newest = tl.load(x + row * x_row + channels // GROUP * x_group + channels % GROUP, mask=mask, other=0.0)
    acc = tl.load(bias + channels, mask=mask, other=0.0)
    for k in tl.static_range(KERNEL_SIZE - 1):
        past = tl.load(conv_state + k * width, mask=has_past, other=0.0)
        acc += tl.load(weight + channels * KERNEL_SIZE + k, mask=mask, other=0.0) * past.to(tl.float32)
        if k > 0:
            tl.store(conv_state + (k - 1) * width, past, mask=mask)
    acc += tl.load(weight + channels * KERNEL_SIZE + KERNEL_SIZE - 1, mask=mask, other=0.0) * newest.to(tl.float32)
    if KERNEL_SIZE > 1:
        tl.store(conv_state + (KERNEL_SIZE - 2) * width, newest, mask=mask)
    tl.store(out + row * width + channels, (acc * tl.sigmoid(acc)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); for a small exponential the division restores the digits lost in the addition."""
    power = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + power
    correction = tl.where(rounded == 1.0, 1.0, power / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
    return tl.where(x > 20.0, x, tl.where(rounded == 1.0, power, tl.log(rounded) * correction))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _state_update_kernel(
    raw_dt, xbc, dt_bias, a, d, state, out, state_indices, positions, seq_lens, dt_row, dt_group, dt_min,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """state = exp(dt * a) * state + dt * x (outer) b; y = state @ c + d * x, of some rows of one head's state."""
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    mask_p, mask_n = p < HEAD_DIM, n < STATE
    out += (row * heads + head) * HEAD_DIM + p
    if tl.load(seq_lens + row) == 0:
        tl.store(out, tl.zeros((BLOCK_P,), out.dtype.element_ty), mask=mask_p)
        return
    group, member = head // GROUP_HEADS, head % GROUP_HEADS
    raw = tl.load(raw_dt + row * dt_row + group * dt_group + member).to(tl.float32)
    dt = tl.maximum(_softplus(raw + tl.load(dt_bias + head)), dt_min)

    xbc += (row * (heads // GROUP_HEADS) + group) * (GROUP_HEADS * HEAD_DIM + 2 * STATE)
    x_P = tl.load(xbc + member * HEAD_DIM + p, mask=mask_p, other=0.0).to(tl.float32)
    b_N = tl.load(xbc + GROUP_HEADS * HEAD_DIM + n, mask=mask_n, other=0.0).to(tl.float32)
    c_N = tl.load(xbc + GROUP_HEADS * HEAD_DIM + STATE + n, mask=mask_n, other=0.0).to(tl.float32)

    state += (tl.load(state_indices + row) * heads + head) * HEAD_DIM * STATE
    state_ptrs = state + p[:, None] * STATE + n[None, :]
    mask = mask_p[:, None] & mask_n[None, :]
    old_PN = tl.load(state_ptrs, mask=mask & (tl.load(positions + row) != 0), other=0.0)
    new_PN = tl.exp(dt * tl.load(a + head)) * old_PN + (dt * x_P)[:, None] * b_N[None, :]
    tl.store(state_ptrs, new_PN, mask=mask)
    y_P = tl.sum(new_PN * c_N[None, :], axis=1) + tl.load(d + head) * x_P
    tl.store(out, y_P.to(out.dtype.element_ty), mask=mask_p)


def selective_state_update_triton(
    xbc_dt_RGC: Tensor, weights: MambaWeights, state: MambaState, rows: StateRows
) -> Tensor:
    """See `selective_state_update.selective_state_update`."""
    assert xbc_dt_RGC.stride(2) == 1
    count, groups, _ = xbc_dt_RGC.shape
    _, heads, head_dim, state_size = state.ssm_state_SHPN.shape
    channels, _, kernel_size = weights.conv_C1K.shape
    group = channels // groups
    xbc_RC = torch.empty(count, channels, dtype=xbc_dt_RGC.dtype, device=xbc_dt_RGC.device)
    _conv_update_kernel[count, triton.cdiv(channels, BLOCK_CHANNELS)](
        xbc_dt_RGC, weights.conv_C1K, weights.conv_bias_C, state.conv_state_SKC, xbc_RC, *rows,
        *xbc_dt_RGC.stride()[:2], channels, KERNEL_SIZE=kernel_size, GROUP=group, BLOCK=BLOCK_CHANNELS,
    )  # fmt: skip
    y_RC = torch.empty(count, heads * head_dim, dtype=xbc_dt_RGC.dtype, device=xbc_dt_RGC.device)
    block = min(BLOCK_HEAD_DIM, triton.next_power_of_2(head_dim))
    _state_update_kernel[count, heads, triton.cdiv(head_dim, block)](
        xbc_dt_RGC[:, :, group:], xbc_RC, weights.dt_bias_H, weights.a_H, weights.d_H, state.ssm_state_SHPN, y_RC,
        *rows, *xbc_dt_RGC.stride()[:2], weights.dt_min,
        GROUP_HEADS=heads // groups, HEAD_DIM=head_dim, STATE=state_size,
        BLOCK_P=block, BLOCK_N=triton.next_power_of_2(state_size),
    )  # fmt: skip
    return y_RC
