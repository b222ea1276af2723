"""Activations as linear layers take them: unquantized, or in fp8 with scales computed from the values themselves.

A layer declares its quantization format; the op that produces the activation (a norm, a gated activation) writes it in
that format, so that on a GPU quantization costs no extra pass over memory.

Shapes: N tokens, K channels, G = K / 128 groups of channels.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmb.ops.dispatch import op

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
MIN_AMAX = 2.0**-100  # a smaller scale would have no inverse in fp32; values that small become zero
GROUP = 128  # channels that share a scale in the format 1x128, and rows and columns of a weight's 128x128 block

QuantFormat = Literal["plain", "per_token", "1x128"]


class PerTokenFp8(NamedTuple):
    """fp8 values with one scale per token."""

    values: Tensor  # [N, K] e4m3
    scales: Tensor  # [N, 1] fp32


class GroupFp8(NamedTuple):
    """fp8 values with one scale per 128 channels of a token (1x128)."""

    values: Tensor  # [N, K] e4m3
    scales: Tensor  # [N, G] fp32


Activation = Tensor | PerTokenFp8 | GroupFp8


@op(when=lambda x_NK, quant_format: quant_format != "plain")
def quantize_activation(x_NK: Tensor, quant_format: QuantFormat) -> Activation:
    """Quantize an activation to a format; "plain" returns it as it is."""
    if quant_format == "plain":
        return x_NK
    if quant_format == "per_token":
        return PerTokenFp8(*_quantize_last_dim(x_NK.float()))
    values_NGK, scales_NG1 = _quantize_last_dim(x_NK.float().unflatten(-1, (-1, GROUP)))
    return GroupFp8(values_NGK.flatten(-2), scales_NG1.squeeze(-1))


def empty_activation(rows: int, width: int, quant_format: QuantFormat, like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate values and scales for a kernel to write; plain ones have the dtype of `like` and no scales."""
    dtype, scales = like.dtype, 0
    if quant_format != "plain":
        dtype, scales = E4M3, 1 if quant_format == "per_token" else width // GROUP
    return (
        torch.empty(rows, width, dtype=dtype, device=like.device),
        torch.empty(rows, scales, dtype=torch.float32, device=like.device),
    )


def as_activation(values_NK: Tensor, scales: Tensor, quant_format: QuantFormat) -> Activation:
    """Wrap values and scales that a kernel has written."""
    if quant_format == "plain":
        return values_NK
    return PerTokenFp8(values_NK, scales) if quant_format == "per_token" else GroupFp8(values_NK, scales)


def dequantize(x: Activation, dtype: torch.dtype) -> Tensor:
    """Return an activation's values times their scales."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    if isinstance(x, PerTokenFp8):
        return (x.values.float() * x.scales).to(dtype)
    values_NGK = x.values.float().unflatten(-1, (-1, GROUP))
    return (values_NGK * x.scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _quantize_last_dim(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / scale in e4m3 and the scales, one along the last dimension."""
    amax = x.abs().amax(dim=-1, keepdim=True).clamp(min=MIN_AMAX)
    scales = amax * (1 / E4M3_MAX)
    return (x * scales.reciprocal()).to(E4M3), scales
