"""State-space duality (SSD) scan of Mamba-2, in three equivalent forms.

For each head, with a state h of head dim x state size:

    h[t] = exp(dt[t] * a) * h[t-1] + dt[t] * x[t] (outer) b[t]
    y[t] = h[t] @ c[t] + d * x[t]

`ssd_sequential` does exactly that, token by token. The reference of `ssd` is the chunked scan: inside a chunk the sums
are matmuls, as in attention, and only the state passes from chunk to chunk (Dao and Gu, 2024, arXiv 2405.21060). The
Triton kernels (`ssd_triton.py`) do the same. All compute in fp32 or wider whatever the inputs are. `ssd_with_state` is
the scan of a chunk of one sequence (chunked prefill), which continues from the state before it.

Tensor names end in their shape: B sequences, T tokens, H heads, P head dim, G groups of heads that share b and c,
N state size, Z chunks, L tokens of a chunk, K heads of a group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


@op
def ssd(x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor, d_H: Tensor, chunk: int) -> Tensor:
    """Return y [B, T, H, P] in the dtype of x, for any sequence length; dt and a are fp32 or wider."""
    return _chunked_scan(None, x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, d_H, chunk)[0]


@op
def ssd_with_state(
    state_HPN: Tensor,
    x_THP: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    d_H: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return y [T, H, P] of one sequence with an initial state, and its final state; without autograd."""
    y_BTHP, final_BHPN = _chunked_scan(
        state_HPN[None], x_THP[None], dt_TH[None], a_H, b_TGN[None], c_TGN[None], d_H, chunk
    )
    return y_BTHP[0], final_BHPN[0]


def ssd_sequential(x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor, d_H: Tensor) -> Tensor:
    """Compute the recurrence token by token: slow and obviously correct."""
    x, dt, a, b, c, d = (at_least_fp32(tensor) for tensor in (x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, d_H))
    group_heads = x.shape[2] // b.shape[2]
    b_BTHN, c_BTHN = b.repeat_interleave(group_heads, dim=2), c.repeat_interleave(group_heads, dim=2)
    state_BHPN = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        decay_BH = (dt[:, t] * a).exp()
        dbx_BHPN = (dt[:, t, :, None] * x[:, t])[..., None] * b_BTHN[:, t, :, None, :]
        state_BHPN = decay_BH[..., None, None] * state_BHPN + dbx_BHPN
        outputs.append((state_BHPN * c_BTHN[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(outputs, dim=1).to(x_BTHP.dtype)


def _chunked_scan(
    initial_BHPN: Tensor | None,
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    d_H: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return y and the final state; an initial state of None is zero."""
    tokens, groups = x_BTHP.shape[1], b_BTGN.shape[2]
    x, dt, b, c = (_split_chunks(at_least_fp32(tensor), chunk) for tensor in (x_BTHP, dt_BTH, b_BTGN, c_BTGN))
    x_BZLGKP = x.unflatten(3, (groups, -1))
    dt_BZLGK = dt.unflatten(3, (groups, -1))
    da_cumsum_BZLGK = (dt_BZLGK * at_least_fp32(a_H).view(groups, -1)).cumsum(dim=2)  # log decay since chunk start
    dtx_BZLGKP = dt_BZLGK[..., None] * x_BZLGKP

    # Within a chunk: token l reads token m through c[l] . b[m] times the decay between them.
    segsum_BZLMGK = da_cumsum_BZLGK[:, :, :, None] - da_cumsum_BZLGK[:, :, None]
    future_LM = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    decay_BZLMGK = segsum_BZLMGK.masked_fill(future_LM[:, :, None, None], -torch.inf).exp()
    cb_BZLMG = torch.einsum("bzlgn,bzmgn->bzlmg", c, b)
    y_BZLGKP = torch.einsum("bzlmgk,bzmgkp->bzlgkp", cb_BZLMG[..., None] * decay_BZLMGK, dtx_BZLGKP)

    # Between chunks: the state that each adds, passed on, and read by the tokens of the next.
    decay_to_end_BZLGK = (da_cumsum_BZLGK[:, :, -1:] - da_cumsum_BZLGK).exp()
    chunk_state_BZGKPN = torch.einsum("bzlgkp,bzlgn->bzgkpn", decay_to_end_BZLGK[..., None] * dtx_BZLGKP, b)
    chunk_decay_BZGK = da_cumsum_BZLGK[:, :, -1].exp()
    initial_BGKPN = torch.zeros_like(chunk_state_BZGKPN[:, 0])
    if initial_BHPN is not None:
        initial_BGKPN = at_least_fp32(initial_BHPN).unflatten(1, (groups, -1))
    states = [initial_BGKPN]
    for z in range(chunk_state_BZGKPN.shape[1]):
        states.append(chunk_decay_BZGK[:, z, :, :, None, None] * states[-1] + chunk_state_BZGKPN[:, z])
    final_BGKPN = states.pop()
    from_state_BZLGKP = torch.einsum("bzlgn,bzgkpn->bzlgkp", c, torch.stack(states, dim=1))
    y_BZLGKP = y_BZLGKP + da_cumsum_BZLGK.exp()[..., None] * from_state_BZLGKP

    y_BTHP = (y_BZLGKP.flatten(3, 4) + at_least_fp32(d_H)[:, None] * x).flatten(1, 2)
    return y_BTHP[:, :tokens].to(x_BTHP.dtype), final_BGKPN.flatten(1, 2)


def _split_chunks(tensor_BT: Tensor, chunk: int) -> Tensor:
    """Reshape [B, T, ...] to [B, Z, L, ...], zero-padded: a token with dt = 0 neither decays nor adds."""
    padding = -tensor_BT.shape[1] % chunk
    padded = F.pad(tensor_BT, (0, 0) * (tensor_BT.ndim - 2) + (0, padding))
    return padded.unflatten(1, (-1, chunk))
