"""GEMM of fp8 activations (1x128 scales) with fp8 weights (128x128 scales).

    weight = quantize_blocks(weight_OK)
    out_NO = block_scaled_gemm(quantize_activation(x_NK, "1x128"), weight, outputs, torch.bfloat16)

This is DeepSeek's format: both operands have one scale for every 128 values of the summed dimension, so a GEMM adds 128
products in the hardware and the scaled partial sums in fp32.

Three implementations: cuBLAS where it supports these scales (Hopper with CUDA 12.9 or later) and there are many tokens;
a Triton kernel for few tokens, which are bound by reading the weight, and for other GPUs; plain torch anywhere else.

Shapes: N tokens, K inputs, O outputs; B blocks along the outputs, the last one padded with zeros; G groups along K.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.device_capabilities import capabilities
from llmb.ops.dispatch import op, takes_triton
from llmb.ops.quant.activation_quant import E4M3, E4M3_MAX, GROUP, MIN_AMAX, GroupFp8, dequantize

MAX_SKINNY_TOKENS = 64
CUBLAS_MULTIPLE = 4  # cuBLAS takes tokens, and groups of a weight's scales, in multiples of this


class BlockScaledWeight(NamedTuple):
    """A weight, or a stack of them: values times the scale of their block."""

    values: Tensor  # [..., B * 128, K] e4m3
    scales: Tensor  # [..., B, G rounded up to a multiple of 4] fp32; the padding is zero


def quantize_blocks(weight_OK: Tensor) -> BlockScaledWeight:
    """Quantize a weight [..., O, K] with a scale for each block of 128 x 128; K is a multiple of 128."""
    outputs, inputs = weight_OK.shape[-2:]
    padded = F.pad(weight_OK.float(), (0, 0, 0, -outputs % GROUP))
    tiles = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))  # [..., B, 128, G, 128]
    scales = tiles.abs().amax(dim=(-3, -1)).clamp(min=MIN_AMAX) * (1 / E4M3_MAX)
    values = (tiles * scales.reciprocal()[..., :, None, :, None]).to(E4M3)
    scales = F.pad(scales, (0, -(inputs // GROUP) % CUBLAS_MULTIPLE))
    return BlockScaledWeight(values.flatten(-2).flatten(-3, -2), scales)


def dequantize_blocks(weight: BlockScaledWeight, outputs: int) -> Tensor:
    """Return the first `outputs` rows of a weight in fp32."""
    groups = weight.values.shape[-1] // GROUP
    tiles = weight.values.float().unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    return (tiles * weight.scales[..., :, None, :groups, None]).flatten(-2).flatten(-3, -2)[..., :outputs, :]


def block_scaled_gemm(x: GroupFp8, weight: BlockScaledWeight, outputs: int, dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T, contiguous [N, outputs], by the fastest implementation."""
    many = len(x.values) > MAX_SKINNY_TOKENS
    if many and takes_triton(x.values) and capabilities(x.values.device).has("fp8_block_gemm"):
        return cublas_block_scaled_gemm(x, weight, outputs, dtype)
    return block_scaled_mm(x, weight, outputs, dtype)


@op(triton="gemm.block_scaled_gemm_triton:block_scaled_mm_triton")
def block_scaled_mm(x: GroupFp8, weight: BlockScaledWeight, outputs: int, dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T of the dequantized operands, accumulated in fp32."""
    return F.linear(dequantize(x, torch.float32), dequantize_blocks(weight, outputs)).to(dtype)


def cublas_block_scaled_gemm(x: GroupFp8, weight: BlockScaledWeight, outputs: int, dtype: torch.dtype) -> Tensor:
    """Run cuBLAS, which takes scales of activations with tokens contiguous, those of weights with groups contiguous."""
    tokens, padding = len(x.values), -len(x.values) % CUBLAS_MULTIPLE
    values_NK, scales_GN = x.values, x.scales.T
    if padding:  # as bytes, since not every operation supports fp8
        values_NK = F.pad(values_NK.view(torch.uint8), (0, 0, 0, padding)).view(E4M3)
        scales_GN = F.pad(scales_GN, (0, padding))
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
