"""Rotary positions in plain torch: pairs of a head's channels turned by their position's angle.

Shapes: any leading ones, T tokens, H heads, D width of a head; cosine and sine are [T, D / 2].
"""

import torch
from torch import Tensor


def rotate(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of each head by their position's angle: the Hugging Face layout of Llama weights."""
    cos, sin = (table.to(x_BTHD.dtype)[:, None, :] for table in (cos_TD, sin_TD))
    first, second = x_BTHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_interleaved(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) instead: the layout of DeepSeek weights. They come out in the order of `rotate`."""
    return rotate(x_BTHD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos_TD, sin_TD)
