"""One token of each of many sequences through a Mamba recurrence: convolution, then state, both kept between calls.

    y_RC = mamba_step(mixed_RGC, weights, state, rows)

A sequence keeps its state in a slot: the last inputs of the convolution and what the recurrence made of all tokens so
far. A sequence's first token (position 0) starts from zero whatever its slot held, so that slots need no clearing; a
row of length 0 belongs to no sequence: it changes nothing and gives zero. Both are decided where the tensors are.

`mamba_step` takes the Triton kernels (`selective_state_update_triton.py`) on a GPU and plain torch elsewhere; both compute in
fp32. `ssd.ssd_from` is the recurrence for many tokens of one sequence.

Shapes: R rows, S slots, G groups of heads, H heads, P width of a head, N state size, K tokens that the convolution
reaches over; C channels, of a group after G and of all otherwise: a group's are the values of its heads, b, and c.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import takes_triton


class MambaState(NamedTuple):
    """What one layer keeps for each slot."""

    inputs_SKC: Tensor  # of the convolution, K - 1 of them, the newest last; in the format of the activations
    state_SHPN: Tensor  # fp32


class MambaWeights(NamedTuple):
    """Of the convolution and the recurrence, all in fp32."""

    conv_C1K: Tensor
    conv_bias_C: Tensor
    dt_bias_H: Tensor
    a_H: Tensor  # rates of decay, negative
    d_H: Tensor
    shortest_step: float  # no token's time step is less


class Rows(NamedTuple):
    """Whose token each row is."""

    slots_R: Tensor  # int64
    positions_R: Tensor  # int64, in its sequence
    lengths_R: Tensor  # of its sequence with it; 0: of none


def mamba_step(mixed_RGC: Tensor, weights: MambaWeights, state: MambaState, rows: Rows) -> Tensor:
    """y [R, H * P] in the format of the input; the slots' state goes on by a token.

    Each group has, after what goes through the convolution, what becomes its heads' time steps.
    """
    if takes_triton(mixed_RGC):
        from llmb.ops.mamba.selective_state_update_triton import mamba_step_triton

        return mamba_step_triton(mixed_RGC, weights, state, rows)
    return mamba_step_reference(mixed_RGC, weights, state, rows)


def mamba_step_reference(mixed_RGC: Tensor, weights: MambaWeights, state: MambaState, rows: Rows) -> Tensor:
    """The same in plain torch."""
    _, heads, width, size = state.state_SHPN.shape
    groups = mixed_RGC.shape[1]
    share = heads // groups
    y_RHP = mixed_RGC.new_zeros(mixed_RGC.shape[0], heads, width)
    live = rows.lengths_R > 0
    slots, begins = rows.slots_R[live], rows.positions_R[live] == 0
    new_RGC, step_RGK = mixed_RGC[live].split((mixed_RGC.shape[2] - share, share), dim=-1)

    before_RKC = state.inputs_SKC[slots].masked_fill(begins[:, None, None], 0)
    reached_RKC = torch.cat((before_RKC, new_RGC.flatten(1)[:, None]), dim=1)
    state.inputs_SKC[slots] = reached_RKC[:, 1:]
    summed_RC = (reached_RKC.float() * weights.conv_C1K[:, 0].T).sum(dim=1) + weights.conv_bias_C
    convolved_RGC = F.silu(summed_RC).to(mixed_RGC.dtype).float().unflatten(-1, (groups, -1))

    x_RGC, b_RGN, c_RGN = convolved_RGC.split((share * width, size, size), dim=-1)
    x_RHP = x_RGC.flatten(1).unflatten(-1, (heads, width))
    b_RHN, c_RHN = (one.repeat_interleave(share, dim=1) for one in (b_RGN, c_RGN))
    dt_RH = time_steps(step_RGK, weights)
    decay_RH = (dt_RH * weights.a_H).exp()
    old_RHPN = state.state_SHPN[slots].masked_fill(begins[:, None, None, None], 0)
    added_RHPN = (dt_RH[..., None] * x_RHP)[..., None] * b_RHN[:, :, None, :]
    new_RHPN = decay_RH[..., None, None] * old_RHPN + added_RHPN
    state.state_SHPN[slots] = new_RHPN
    read_RHP = (new_RHPN * c_RHN[:, :, None, :]).sum(dim=-1)
    y_RHP[live] = (read_RHP + weights.d_H[:, None] * x_RHP).to(y_RHP.dtype)
    return y_RHP.flatten(1)


def time_steps(step_RGK: Tensor, weights: MambaWeights) -> Tensor:
    """What the projection made for each head as its time step, [R, H] in fp32."""
    return F.softplus(step_RGK.float().flatten(1) + weights.dt_bias_H).clamp(min=weights.shortest_step)
