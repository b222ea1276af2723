"""Rotary position embedding (RoPE): pairs of a head's channels are rotated by the angle of their position.

`apply_rope` and `apply_rope_interleaved` are plain torch and return a new tensor; `apply_rope_` works in place and
`apply_rope_out` writes to another tensor, in one pass over memory, with a Triton kernel (`rope_triton.py`) on a GPU.
`qkv_rope_backward` takes all gradients of attention at once.
Shapes: any leading dimensions, T tokens (N rows), H heads, G KV heads, D head width, X = (H + 2 G) D; cosine and sine
are [T, D / 2].
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


def apply_rope(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head, as Hugging Face lays out Llama weights (NeoX style)."""
    cos, sin = (table.to(x_BTHD.dtype)[:, None, :] for table in (cos_TD, sin_TD))
    first, second = x_BTHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def apply_rope_interleaved(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1), as in DeepSeek weights. The output has the channel order of `apply_rope`."""
    return apply_rope(x_BTHD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos_TD, sin_TD)


def apply_rope_(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> None:
    """Apply RoPE in place to heads that may be views of wider rows; computed in fp32 and rounded once."""
    apply_rope_out(x_NHD, x_NHD, cos_ND, sin_ND)


@op
def apply_rope_out(out_NHD: Tensor, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False) -> None:
    """Apply RoPE and write to `out`, which saves a copy. Both may be heads inside wider rows.

    The inverse rotates back, which is also the backward of RoPE.
    """
    out_NHD.copy_(apply_rope(at_least_fp32(x_NHD), cos_ND, -sin_ND if inverse else sin_ND))


@op
def qkv_rope_backward(
    dqkv_NX: Tensor, dq_NHD: Tensor, dk_NGD: Tensor, dv_NGD: Tensor, cos_ND: Tensor | None, sin_ND: Tensor | None
) -> None:
    """Write the gradients of queries and keys before RoPE, and those of values, side by side.

    Without cosine and sine there is no RoPE. `dq` may be the columns of `dqkv` that it is written to; all may be heads
    inside wider rows.
    """
    grads = dq_NHD, dk_NGD, dv_NGD
    columns = dqkv_NX.split([grad.shape[1] * grad.shape[2] for grad in grads], dim=1)
    for out, grad in zip(columns, grads, strict=True):
        out_NHD = out.unflatten(1, grad.shape[1:])
        if grad is dv_NGD or cos_ND is None or sin_ND is None:
            out_NHD.copy_(grad)
        else:
            apply_rope_out.reference(out_NHD, grad, cos_ND, sin_ND, inverse=True)
