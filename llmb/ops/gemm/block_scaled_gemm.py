"""8-bit weights with a scale for each block of 128 x 128, and their product with an activation in the form `groups8`.

    weight = in_blocks(weight_OK)
    out_NO = block_product(in_form(x_NK, "groups8"), weight, outputs, torch.bfloat16)

This is DeepSeek's format: both operands have one scale for every 128 numbers of the summed dimension, so a product adds
128 of them in the hardware and the scaled sums in fp32.

Three ways to the same result: cuBLAS where it knows these scales (Hopper with CUDA 12.9 or later) and there are many
tokens; a Triton kernel for few tokens, where all that counts is how fast the weight is read, and for other GPUs; plain
torch anywhere else.

Shapes: N tokens, K inputs, O outputs; B blocks along the outputs, the last one filled up with zeros; G groups along K.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.dispatch import takes_triton
from llmb.ops.quant.activation_quant import E4M3, GROUP, LARGEST, SMALLEST_AMAX, Groups8, as_plain

FEW_TOKENS = 64
# What cuBLAS wants: scales of a weight in rows of whole fours, and tokens in fours.
FOURS = 4


class Blocks8(NamedTuple):
    """A weight, or a stack of them: values times the scale of their block."""

    values: Tensor  # [..., B * 128, K] e4m3
    scales: Tensor  # [..., B, G rounded up to fours] fp32; what was added is zero


def in_blocks(weight_OK: Tensor) -> Blocks8:
    """A weight [..., O, K] rounded; K is a multiple of 128."""
    outputs, inputs = weight_OK.shape[-2:]
    whole = F.pad(weight_OK.float(), (0, 0, 0, -outputs % GROUP))
    tiles = whole.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))  # [..., B, 128, G, 128]
    scales = tiles.abs().amax(dim=(-3, -1)).clamp(min=SMALLEST_AMAX) * (1 / LARGEST)
    values = (tiles * scales.reciprocal()[..., :, None, :, None]).to(E4M3)
    return Blocks8(values.flatten(-2).flatten(-3, -2), F.pad(scales, (0, -(inputs // GROUP) % FOURS)))


def from_blocks(weight: Blocks8, outputs: int) -> Tensor:
    """The numbers that a weight stands for, in fp32."""
    groups = weight.values.shape[-1] // GROUP
    tiles = weight.values.float().unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    return (tiles * weight.scales[..., :, None, :groups, None]).flatten(-2).flatten(-3, -2)[..., :outputs, :]


def block_product_reference(x: Groups8, weight: Blocks8, outputs: int, dtype: torch.dtype) -> Tensor:
    """x @ weight.T of the numbers that both stand for, added in fp32."""
    return F.linear(as_plain(x, torch.float32), from_blocks(weight, outputs)).to(dtype)


def block_product(x: Groups8, weight: Blocks8, outputs: int, dtype: torch.dtype) -> Tensor:
    """The same by the fastest way there is, [N, outputs] and contiguous."""
    if not takes_triton(x.values):
        return block_product_reference(x, weight, outputs, dtype)
    if len(x.values) > FEW_TOKENS and cublas_knows_blocks(x.values.device):
        return cublas_product(x, weight, outputs, dtype)
    from llmb.ops.gemm.block_scaled_gemm_triton import block_product_triton

    return block_product_triton(x, weight, outputs, dtype)


@cache
def cublas_knows_blocks(device: torch.device) -> bool:
    """As torch checks it: nothing but Hopper, and a library of CUDA 12.9 or later."""
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return torch.cuda.get_device_capability(device)[0] == 9 and cuda >= (12, 9)


def cublas_product(x: Groups8, weight: Blocks8, outputs: int, dtype: torch.dtype) -> Tensor:
    """Scales of tokens are wanted with the tokens side by side, those of blocks with the groups side by side."""
    tokens, more = len(x.values), -len(x.values) % FOURS
    values_NK, scales_GN = x.values, x.scales.T
    if more:  # as bytes, since not every operation knows the 8-bit type
        values_NK = F.pad(values_NK.view(torch.uint8), (0, 0, 0, more)).view(E4M3)
        scales_GN = F.pad(scales_GN, (0, more))
    out_NO = F.scaled_mm(
        values_NK,
        weight.values.T,
        scale_a=scales_GN.contiguous().T,
        scale_recipe_a=F.ScalingType.BlockWise1x128,
        scale_b=weight.scales.T,
        scale_recipe_b=F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return out_NO[:tokens, :outputs].contiguous()
