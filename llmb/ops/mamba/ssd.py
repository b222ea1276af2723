"""The state-space recurrence of Mamba-2, in three forms that give the same numbers.

For each head, with a state h of head width x state size:

    h[t] = exp(dt[t] * a) * h[t-1] + dt[t] * x[t] (outer) b[t]
    y[t] = h[t] @ c[t] + d * x[t]

`ssd_reference` does exactly that, token after token. `ssd_chunked` cuts the sequence into chunks, inside which the same
sums are matrix products, as in attention, and between which only the state is carried on: state-space duality (Dao and
Gu, 2024, arXiv 2405.21060). `ssd` takes the Triton kernels (`ssd_triton.py`) on a GPU and the chunked form elsewhere.
All compute in fp32 or wider, whatever the inputs are. `ssd_from` is the same for a piece of one sequence, which goes on
from the state that the piece before left.

Tensor names end in their shape: B sequences, T tokens, H heads, P width of a head, G groups of heads that share b and
c, N state size, Z chunks, L tokens of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def ssd(x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor, d_H: Tensor, chunk: int) -> Tensor:
    """y [B, T, H, P] in the format of x, by the fastest form that the device has; dt and a in fp32 or wider."""
    if takes_triton(x_BTHP):
        from llmb.ops.mamba.ssd_triton import ssd_triton

        return ssd_triton(x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, d_H, chunk)
    return ssd_chunked(x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, d_H, chunk)


def ssd_from(
    state_HPN: Tensor,
    x_THP: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    d_H: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """y [T, H, P] of one sequence that goes on from a state, and the state it ends in; not for gradients."""
    if takes_triton(x_THP):
        from llmb.ops.mamba.ssd_triton import ssd_from_triton

        return ssd_from_triton(state_HPN, x_THP, dt_TH, a_H, b_TGN, c_TGN, d_H, chunk)
    y_BTHP, end_BHPN = _chunked(state_HPN[None], x_THP[None], dt_TH[None], a_H, b_TGN[None], c_TGN[None], d_H, chunk)
    return y_BTHP[0], end_BHPN[0]


def ssd_reference(x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor, d_H: Tensor) -> Tensor:
    """The recurrence one token after the other: slow, and plainly right."""
    x, dt, a, b, c, d = (_wide(one) for one in (x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, d_H))
    share = x.shape[2] // b.shape[2]
    b_BTHN, c_BTHN = b.repeat_interleave(share, dim=2), c.repeat_interleave(share, dim=2)
    state_BHPN = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        decay_BH = (dt[:, t] * a).exp()
        added_BHPN = (dt[:, t, :, None] * x[:, t])[..., None] * b_BTHN[:, t, :, None, :]
        state_BHPN = decay_BH[..., None, None] * state_BHPN + added_BHPN
        outputs.append((state_BHPN * c_BTHN[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(outputs, dim=1).to(x_BTHP.dtype)


def ssd_chunked(
    x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor, d_H: Tensor, chunk: int
) -> Tensor:
    """The same in matrix products over chunks, of any sequence length; autograd goes through it."""
    return _chunked(None, x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, d_H, chunk)[0]


def _chunked(
    state_BHPN: Tensor | None,
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    d_H: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """y, and the state after the last token; a state of None is zero."""
    tokens, groups = x_BTHP.shape[1], b_BTGN.shape[2]
    x, dt, b, c = (_in_chunks(_wide(one), chunk) for one in (x_BTHP, dt_BTH, b_BTGN, c_BTGN))
    x_BZLGKP = x.unflatten(3, (groups, -1))  # K: heads of a group
    dt_BZLGK = dt.unflatten(3, (groups, -1))
    fallen_BZLGK = (dt_BZLGK * _wide(a_H).view(groups, -1)).cumsum(dim=2)  # log of the decay since the chunk began
    input_BZLGKP = dt_BZLGK[..., None] * x_BZLGKP

    # Within the chunk: token l reads token m through c[l] . b[m], faded by the decay between them.
    reach_BZLMGK = fallen_BZLGK[:, :, :, None] - fallen_BZLGK[:, :, None]
    later_LM = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    fade_BZLMGK = reach_BZLMGK.masked_fill(later_LM[:, :, None, None], -torch.inf).exp()
    score_BZLMG = torch.einsum("bzlgn,bzmgn->bzlmg", c, b)
    y_BZLGKP = torch.einsum("bzlmgk,bzmgkp->bzlgkp", score_BZLMG[..., None] * fade_BZLMGK, input_BZLGKP)

    # Between chunks: what each leaves behind, carried on, and read by the tokens of the next.
    left_BZLGK = (fallen_BZLGK[:, :, -1:] - fallen_BZLGK).exp()
    own_BZGKPN = torch.einsum("bzlgkp,bzlgn->bzgkpn", left_BZLGK[..., None] * input_BZLGKP, b)
    whole_BZGK = fallen_BZLGK[:, :, -1].exp()
    first_BGKPN = torch.zeros_like(own_BZGKPN[:, 0])
    if state_BHPN is not None:
        first_BGKPN = _wide(state_BHPN).unflatten(1, (groups, -1))
    entering = [first_BGKPN]
    for z in range(own_BZGKPN.shape[1]):
        entering.append(whole_BZGK[:, z, :, :, None, None] * entering[-1] + own_BZGKPN[:, z])
    end_BGKPN = entering.pop()
    read_BZLGKP = torch.einsum("bzlgn,bzgkpn->bzlgkp", c, torch.stack(entering, dim=1))
    y_BZLGKP = y_BZLGKP + fallen_BZLGK.exp()[..., None] * read_BZLGKP

    y_BTHP = (y_BZLGKP.flatten(3, 4) + _wide(d_H)[:, None] * x).flatten(1, 2)
    return y_BTHP[:, :tokens].to(x_BTHP.dtype), end_BGKPN.flatten(1, 2)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _in_chunks(tensor_BT: Tensor, chunk: int) -> Tensor:
    """[B, T, ...] as [B, Z, L, ...]; zeros fill the last chunk: a token with dt = 0 neither decays nor adds."""
    missing = -tensor_BT.shape[1] % chunk
    padded = F.pad(tensor_BT, (0, 0) * (tensor_BT.ndim - 2) + (0, missing))
    return padded.unflatten(1, (-1, chunk))
