"""Queries and keys of MLA: channels without positions (nope), and behind them those with RoPE.

    q_BTHD = mla_rope_queries(q_BTHD, cos_TF, sin_TF)                      # rotates the last channels of each head
    k_BTHD, v_BTHD = mla_rope_keys(kv_BTHD, key_BTR, cos_TF, sin_TF, nope)  # all heads share the rotated key

Pairs (2i, 2i + 1) are rotated in place: the order of channels does not matter to the product of queries and keys.
`rope.apply_rope_interleaved` permutes them, which takes another pass.

On a GPU each is one pass over memory (`mla_rope_triton.py`), and so is its backward: a gradient is rotated back, that
of the shared key is summed over heads, and keys and values write theirs into one tensor. Computed in fp32 and rounded
once. Shapes: B sequences, T tokens, H heads, D head width, R of which are rotated, F = R / 2 pairs, N = D - R.
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


@op
def mla_rope_queries(q_BTHD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Return heads with their last 2 F channels rotated."""
    rope = 2 * cos_TF.shape[-1]
    nope_BTHN, rope_BTHR = q_BTHD.split((q_BTHD.shape[-1] - rope, rope), dim=-1)
    return torch.cat((nope_BTHN, _rotate_pairs(rope_BTHR, cos_TF, sin_TF)), dim=-1)


@op
def mla_rope_keys(kv_BTHD: Tensor, key_BTR: Tensor, cos_TF: Tensor, sin_TF: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Return keys, `nope` channels of each head and then the shared key rotated, and values, a view of the rest."""
    nope_BTHN, v_BTHD = kv_BTHD.split((nope, kv_BTHD.shape[-1] - nope), dim=-1)
    rope_BT1R = _rotate_pairs(key_BTR[:, :, None], cos_TF, sin_TF)
    return torch.cat((nope_BTHN, rope_BT1R.expand(-1, -1, kv_BTHD.shape[2], -1)), dim=-1), v_BTHD


def _rotate_pairs(x_BTHR: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    first, second = at_least_fp32(x_BTHR).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.flatten(-2).to(x_BTHR.dtype)
