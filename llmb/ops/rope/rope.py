"""Rotary positions: pairs of a head's channels turned by their position's angle.

`rotate` and `rotate_interleaved` are plain torch with a new tensor; `rotate_in_place` turns heads where they lie and
`rotate_into` on their way elsewhere, in one pass over memory, with the Triton kernel (`rope_triton.py`) on a GPU.
Shapes: any leading ones, T tokens (N rows), H heads, D width of a head; cosine and sine are [T, D / 2].
"""

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def rotate(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of each head by their position's angle: the Hugging Face layout of Llama weights."""
    cos, sin = (table.to(x_BTHD.dtype)[:, None, :] for table in (cos_TD, sin_TD))
    first, second = x_BTHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_interleaved(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) instead: the layout of DeepSeek weights. They come out in the order of `rotate`."""
    return rotate(x_BTHD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos_TD, sin_TD)


def rotate_in_place(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False) -> None:
    """As `rotate`, over x itself, which may be heads inside wider rows; computed in fp32 and rounded once. The inverse
    turns back, which is also how a slope goes back through a rotation."""
    rotate_into(x_NHD, x_NHD, cos_ND, sin_ND, inverse)


def rotate_into(out_NHD: Tensor, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False) -> None:
    """The same into other memory, which spares a copy. Both may be heads inside wider rows."""
    if takes_triton(x_NHD):
        from llmb.ops.rope.rope_triton import rotate_into_triton

        rotate_into_triton(out_NHD, x_NHD, cos_ND, sin_ND, inverse)
    else:
        rotate_into_reference(out_NHD, x_NHD, cos_ND, sin_ND, inverse)


def rotate_into_reference(
    out_NHD: Tensor, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False
) -> None:
    """The same in plain torch."""
    wide = x_NHD.to(torch.promote_types(x_NHD.dtype, torch.float32))
    out_NHD.copy_(rotate(wide, cos_ND, -sin_ND if inverse else sin_ND))
