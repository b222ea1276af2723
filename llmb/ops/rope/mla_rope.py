"""Queries and keys of latent attention, put together: channels that lie still, and behind them those that are turned.

    q_BTHD = latent_queries(q_BTHD, cos_TF, sin_TF)                     # turns the last channels of each head
    k_BTHD, v_BTHD = latent_keys(kv_BTHD, key_BTR, cos_TF, sin_TF, still)  # all heads share the key that is turned

Pairs (2i, 2i + 1) are turned by their position's angle and stay where they are: it is all the same to a product of
queries and keys. `rotation.rotate_interleaved` puts them in another order, which takes another pass.

On a GPU each is one pass over memory (`mla_rope_triton.py`), and so is its way back: a slope is turned the other
way, that of the shared key is a sum over heads, and keys and values give theirs into one tensor. Computed in fp32 and
rounded once. Shapes: B sequences, T tokens, H heads, D width of a head, R of which are turned, F = R / 2 pairs.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.dense_rows import dense_rows
from llmb.ops.dispatch import takes_triton
from llmb.ops.rope.rope_autograd import Turned


def latent_queries(q_BTHD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Heads with their last 2 F channels turned."""
    if takes_triton(q_BTHD):
        return Turned.apply(q_BTHD, cos_TF, sin_TF, _with_turned_end)
    still, turned = q_BTHD.shape[-1] - 2 * cos_TF.shape[-1], 2 * cos_TF.shape[-1]
    still_BTHN, turned_BTHR = q_BTHD.split((still, turned), dim=-1)
    return torch.cat((still_BTHN, turn_pairs(turned_BTHR, cos_TF, sin_TF)), dim=-1)


def latent_keys(kv_BTHD: Tensor, key_BTR: Tensor, cos_TF: Tensor, sin_TF: Tensor, still: int) -> tuple[Tensor, Tensor]:
    """Keys, each head's own `still` channels and then the shared ones turned; and values, a view of what is left."""
    if takes_triton(kv_BTHD):
        return _Keys.apply(kv_BTHD, key_BTR, cos_TF, sin_TF, still)
    still_BTHN, v_BTHD = kv_BTHD.split((still, kv_BTHD.shape[-1] - still), dim=-1)
    turned_BT1R = turn_pairs(key_BTR[:, :, None], cos_TF, sin_TF)
    return torch.cat((still_BTHN, turned_BT1R.expand(-1, -1, kv_BTHD.shape[2], -1)), dim=-1), v_BTHD


def turn_pairs(x_BTHR: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """The plain form of the turning."""
    wide = x_BTHR.to(torch.promote_types(x_BTHR.dtype, torch.float32))
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x_BTHR.dtype)


def _with_turned_end(x_BTHD: Tensor, cos_TF: Tensor, sin_TF: Tensor, inverse: bool) -> Tensor:
    from llmb.ops.rope.mla_rope_triton import put_together

    x_BTHD = dense_rows(x_BTHD)
    out_BTHD = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)
    still = x_BTHD.shape[-1] - 2 * cos_TF.shape[-1]
    put_together(out_BTHD, x_BTHD, x_BTHD[..., still:], cos_TF, sin_TF, inverse)
    return out_BTHD


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kv_BTHD: Tensor, key_BTR: Tensor, cos_TF: Tensor, sin_TF: Tensor, still: int
    ) -> tuple[Tensor, Tensor]:
        from llmb.ops.rope.mla_rope_triton import put_together

        ctx.save_for_backward(cos_TF, sin_TF)
        kv_BTHD = dense_rows(kv_BTHD)
        k_BTHD = kv_BTHD.new_empty(*kv_BTHD.shape[:3], still + key_BTR.shape[-1])
        shared_BTHR = dense_rows(key_BTR)[:, :, None].expand(-1, -1, kv_BTHD.shape[2], -1)
        put_together(k_BTHD, kv_BTHD, shared_BTHR, cos_TF, sin_TF, inverse=False)
        return k_BTHD, kv_BTHD[..., still:]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dk_BTHD: Tensor, dv_BTHD: Tensor) -> tuple[Tensor | None, ...]:
        from llmb.ops.rope.mla_rope_triton import take_apart

        dk_BTHD, dv_BTHD = dense_rows(dk_BTHD), dense_rows(dv_BTHD)
        cos_TF, sin_TF = ctx.saved_tensors
        still = dk_BTHD.shape[-1] - 2 * cos_TF.shape[-1]
        dkv_BTHD = dk_BTHD.new_empty(*dk_BTHD.shape[:3], still + dv_BTHD.shape[-1])
        dkey_BTR = dk_BTHD.new_empty(*dk_BTHD.shape[:2], 2 * cos_TF.shape[-1])
        take_apart(dkv_BTHD, dkey_BTR, dk_BTHD, dv_BTHD, cos_TF, sin_TF)
        return dkv_BTHD, dkey_BTR, None, None, None
