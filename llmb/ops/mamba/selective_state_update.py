"""Decode step of Mamba-2: one token of each of many sequences through convolution and SSM, with cached states.

    y_RC = selective_state_update(xbc_dt_RGC, weights, state, rows)

A sequence has its state in a slot: the last inputs of the convolution and the SSM state. The first token of a sequence
(position 0) starts from zero whatever its slot held, so slots need no clearing; a row with sequence length 0 is
padding: it changes nothing and outputs zero. Both are decided on the device. All arithmetic is in fp32.
`ssd.ssd_with_state` is the same recurrence for many tokens of one sequence.

Shapes: R rows, S slots, G groups of heads, H heads, P head dim, N state size, K kernel size of the convolution;
C channels (of a group after G, of all otherwise): x of a group's heads, B, and C.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op


class MambaState(NamedTuple):
    """State of one layer, by slot."""

    conv_state_SKC: Tensor  # last K - 1 inputs of the convolution, newest last, in the dtype of the activations
    ssm_state_SHPN: Tensor  # fp32


class MambaWeights(NamedTuple):
    """Weights of convolution and SSM, all in fp32."""

    conv_C1K: Tensor
    conv_bias_C: Tensor
    dt_bias_H: Tensor
    a_H: Tensor  # decay rates, negative
    d_H: Tensor
    dt_min: float


class StateRows(NamedTuple):
    """Sequence that each row belongs to."""

    state_indices_R: Tensor  # int64, slots
    positions_R: Tensor  # int64, in the sequence
    seq_lens_R: Tensor  # including this token; 0 for padding


@op
def selective_state_update(xbc_dt_RGC: Tensor, weights: MambaWeights, state: MambaState, rows: StateRows) -> Tensor:
    """Return y [R, H * P] in the dtype of the input and advance the slots' states by one token.

    Each group of the input ends with the raw time steps of its heads, after the channels of the convolution.
    """
    _, heads, head_dim, state_size = state.ssm_state_SHPN.shape
    groups = xbc_dt_RGC.shape[1]
    group_heads = heads // groups
    y_RHP = xbc_dt_RGC.new_zeros(xbc_dt_RGC.shape[0], heads, head_dim)
    valid = rows.seq_lens_R > 0
    slots, is_first = rows.state_indices_R[valid], rows.positions_R[valid] == 0
    xbc_RGC, dt_RGK = xbc_dt_RGC[valid].split((xbc_dt_RGC.shape[2] - group_heads, group_heads), dim=-1)

    past_RKC = state.conv_state_SKC[slots].masked_fill(is_first[:, None, None], 0)
    window_RKC = torch.cat((past_RKC, xbc_RGC.flatten(1)[:, None]), dim=1)
    state.conv_state_SKC[slots] = window_RKC[:, 1:]
    conv_RC = (window_RKC.float() * weights.conv_C1K[:, 0].T).sum(dim=1) + weights.conv_bias_C
    conv_RGC = F.silu(conv_RC).to(xbc_dt_RGC.dtype).float().unflatten(-1, (groups, -1))

    x_RGC, b_RGN, c_RGN = conv_RGC.split((group_heads * head_dim, state_size, state_size), dim=-1)
    x_RHP = x_RGC.flatten(1).unflatten(-1, (heads, head_dim))
    b_RHN, c_RHN = (tensor.repeat_interleave(group_heads, dim=1) for tensor in (b_RGN, c_RGN))
    dt_RH = compute_dt(dt_RGK, weights)
    decay_RH = (dt_RH * weights.a_H).exp()
    old_RHPN = state.ssm_state_SHPN[slots].masked_fill(is_first[:, None, None, None], 0)
    dbx_RHPN = (dt_RH[..., None] * x_RHP)[..., None] * b_RHN[:, :, None, :]
    new_RHPN = decay_RH[..., None, None] * old_RHPN + dbx_RHPN
    state.ssm_state_SHPN[slots] = new_RHPN
    cy_RHP = (new_RHPN * c_RHN[:, :, None, :]).sum(dim=-1)
    y_RHP[valid] = (cy_RHP + weights.d_H[:, None] * x_RHP).to(y_RHP.dtype)
    return y_RHP.flatten(1)


def compute_dt(dt_RGK: Tensor, weights: MambaWeights) -> Tensor:
    """Return the time step of each head from the projection's raw output, [R, H] in fp32."""
    return F.softplus(dt_RGK.float().flatten(1) + weights.dt_bias_H).clamp(min=weights.dt_min)
