"""One token of each sequence through a Mamba recurrence as two Triton kernels; `selective_state_update.py` says what they compute.

Nearly all of it is reading and writing the states, once. The convolution comes first, in a kernel of its own, because
what it makes for a group is read by all of the group's heads while its own state moves on. A program has one row and
some of its channels, or some of one head's rows of state: enough programs for a small batch to keep a GPU busy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.mamba.selective_state_update import MambaState, MambaWeights, Rows

TILE_CHANNELS = 256
TILE_WIDTH = 32  # rows of a head's state that one program has; its columns are taken whole
# Whose rows these are lies anywhere in a step's numbers: no kernel is to be compiled again for where.
ANYWHERE = ("slots", "positions", "lengths")


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def _conv_step_kernel(
    x, weight, bias, kept, out, slots, positions, lengths, x_row, x_group, width,
    REACH: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """silu of the sum over a channel's last inputs, which move on by one."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(lengths + row) == 0:
        return
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channels < width
    going_on = inside & (tl.load(positions + row) != 0)
    kept += tl.load(slots + row) * (REACH - 1) * width + channels
    newest = tl.load(x + row * x_row + channels // GROUP * x_group + channels % GROUP, mask=inside, other=0.0)
    total = tl.load(bias + channels, mask=inside, other=0.0)
    for k in tl.static_range(REACH - 1):
        older = tl.load(kept + k * width, mask=going_on, other=0.0)
        total += tl.load(weight + channels * REACH + k, mask=inside, other=0.0) * older.to(tl.float32)
        if k > 0:
            tl.store(kept + (k - 1) * width, older, mask=inside)
    total += tl.load(weight + channels * REACH + REACH - 1, mask=inside, other=0.0) * newest.to(tl.float32)
    if REACH > 1:
        tl.store(kept + (REACH - 2) * width, newest, mask=inside)
    tl.store(out + row * width + channels, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); where the exponential is small, 1 + it loses digits that the division gives back."""
    power = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + power
    lost = tl.where(rounded == 1.0, 1.0, power / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
    return tl.where(x > 20.0, x, tl.where(rounded == 1.0, power, tl.log(rounded) * lost))


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def _recurrence_step_kernel(
    steps, convolved, dt_bias, a, d, state, out, slots, positions, lengths, step_row, step_group, shortest,
    SHARE: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """state = exp(dt * a) * state + dt * x (outer) b; y = state @ c + d * x, of some rows of one head's state."""
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    p, n = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P), tl.arange(0, TILE_N)
    in_p, in_n = p < WIDTH, n < STATE
    out += (row * heads + head) * WIDTH + p
    if tl.load(lengths + row) == 0:
        tl.store(out, tl.zeros((TILE_P,), out.dtype.element_ty), mask=in_p)
        return
    group, member = head // SHARE, head % SHARE
    step = tl.load(steps + row * step_row + group * step_group + member).to(tl.float32)
    dt = tl.maximum(_softplus(step + tl.load(dt_bias + head)), shortest)

    convolved += (row * (heads // SHARE) + group) * (SHARE * WIDTH + 2 * STATE)
    x_P = tl.load(convolved + member * WIDTH + p, mask=in_p, other=0.0).to(tl.float32)
    b_N = tl.load(convolved + SHARE * WIDTH + n, mask=in_n, other=0.0).to(tl.float32)
    c_N = tl.load(convolved + SHARE * WIDTH + STATE + n, mask=in_n, other=0.0).to(tl.float32)

    state += (tl.load(slots + row) * heads + head) * WIDTH * STATE
    places = state + p[:, None] * STATE + n[None, :]
    inside = in_p[:, None] & in_n[None, :]
    old_PN = tl.load(places, mask=inside & (tl.load(positions + row) != 0), other=0.0)
    new_PN = tl.exp(dt * tl.load(a + head)) * old_PN + (dt * x_P)[:, None] * b_N[None, :]
    tl.store(places, new_PN, mask=inside)
    y_P = tl.sum(new_PN * c_N[None, :], axis=1) + tl.load(d + head) * x_P
    tl.store(out, y_P.to(out.dtype.element_ty), mask=in_p)


def mamba_step_triton(mixed_RGC: Tensor, weights: MambaWeights, state: MambaState, rows: Rows) -> Tensor:
    """As `mamba_state.mamba_step`."""
    assert mixed_RGC.stride(2) == 1
    count, groups, _ = mixed_RGC.shape
    _, heads, width, size = state.state_SHPN.shape
    channels, _, reach = weights.conv_C1K.shape
    group = channels // groups
    convolved_RC = torch.empty(count, channels, dtype=mixed_RGC.dtype, device=mixed_RGC.device)
    _conv_step_kernel[count, triton.cdiv(channels, TILE_CHANNELS)](
        mixed_RGC, weights.conv_C1K, weights.conv_bias_C, state.inputs_SKC, convolved_RC, *rows,
        *mixed_RGC.stride()[:2], channels, REACH=reach, GROUP=group, TILE=TILE_CHANNELS,
    )  # fmt: skip
    y_RC = torch.empty(count, heads * width, dtype=mixed_RGC.dtype, device=mixed_RGC.device)
    tile = min(TILE_WIDTH, triton.next_power_of_2(width))
    _recurrence_step_kernel[count, heads, triton.cdiv(width, tile)](
        mixed_RGC[:, :, group:], convolved_RC, weights.dt_bias_H, weights.a_H, weights.d_H, state.state_SHPN, y_RC,
        *rows, *mixed_RGC.stride()[:2], weights.shortest_step,
        SHARE=heads // groups, WIDTH=width, STATE=size, TILE_P=tile, TILE_N=triton.next_power_of_2(size),
    )  # fmt: skip
    return y_RC
