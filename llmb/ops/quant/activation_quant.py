"""What an activation looks like when it meets a linear layer: plain, or in 8 bits with scales found from itself.

A layer says which form it wants; whatever makes the activation (a norm, a gated product) gives it in that form, so that
on a GPU rounding costs no pass over memory of its own.

Shapes: N tokens, K channels, G = K / 128 groups of them.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST_AMAX = 2.0**-100  # a smaller scale would have no inverse in fp32; such small numbers fade to zero
GROUP = 128  # channels that share a scale in the form `groups8`, and rows and columns of a weight's block

Form = Literal["plain", "rows8", "groups8"]


class Rows8(NamedTuple):
    """8-bit values, with one scale for each token."""

    values: Tensor  # [N, K] e4m3
    scales: Tensor  # [N, 1] fp32


class Groups8(NamedTuple):
    """8-bit values, with one scale for each 128 channels of a token."""

    values: Tensor  # [N, K] e4m3
    scales: Tensor  # [N, G] fp32


Activation = Tensor | Rows8 | Groups8


def in_form(x_NK: Tensor, form: Form) -> Activation:
    """An activation in the form asked for, by a kernel where there is one."""
    if form != "plain" and takes_triton(x_NK):
        from llmb.ops.quant.activation_quant_triton import in_form_triton

        return in_form_triton(x_NK, form)
    return in_form_reference(x_NK, form)


def in_form_reference(x_NK: Tensor, form: Form) -> Activation:
    """The same in plain torch."""
    if form == "plain":
        return x_NK
    if form == "rows8":
        return Rows8(*_scaled(x_NK.float()))
    values_NGK, scales_NG1 = _scaled(x_NK.float().unflatten(-1, (-1, GROUP)))
    return Groups8(values_NGK.flatten(-2), scales_NG1.squeeze(-1))


def room_for(rows: int, width: int, form: Form, like: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales for a kernel to write; plain ones are in the format of `like` and have no scales."""
    dtype, scales = (like.dtype, 0) if form == "plain" else (E4M3, 1 if form == "rows8" else width // GROUP)
    return (
        torch.empty(rows, width, dtype=dtype, device=like.device),
        torch.empty(rows, scales, dtype=torch.float32, device=like.device),
    )


def as_form(values_NK: Tensor, scales: Tensor, form: Form) -> Activation:
    """What a kernel has written there."""
    if form == "plain":
        return values_NK
    return Rows8(values_NK, scales) if form == "rows8" else Groups8(values_NK, scales)


def as_plain(x: Activation, dtype: torch.dtype) -> Tensor:
    """The numbers that an activation stands for."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    if isinstance(x, Rows8):
        return (x.values.float() * x.scales).to(dtype)
    values_NGK = x.values.float().unflatten(-1, (-1, GROUP))
    return (values_NGK * x.scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / scale in 8 bits, with one scale along the last dimension."""
    largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_AMAX)
    scales = largest * (1 / LARGEST)
    return (x * scales.reciprocal()).to(E4M3), scales
