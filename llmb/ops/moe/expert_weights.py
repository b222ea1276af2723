"""One weight matrix of every expert, stacked, unquantized or in one of the formats that MoE GEMMs support.

    weights = empty_expert_weights((experts, outputs, inputs), "1x128", torch.bfloat16, device)
    fill_expert_rows(weights, expert, 0, weight_OI)

Filled matrix by matrix, so that only one of them need exist unquantized.

Shapes: E experts, O outputs and I inputs of a matrix.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmb.ops.gemm.block_scaled_gemm import BlockScaledWeight, dequantize_blocks, quantize_blocks
from llmb.ops.quant.activation_quant import E4M3, GROUP, PerTokenFp8, QuantFormat, quantize_activation
from llmb.ops.quant.e2m1 import SWIZZLE_GROUP, swizzle_e2m1, unswizzle_e2m1
from llmb.ops.quant.mxfp4 import MXFP4_GROUP, Mxfp4, dequantize_mxfp4, quantize_mxfp4
from llmb.ops.quant.nvfp4 import NVFP4_GROUP, Nvfp4, dequantize_nvfp4, quantize_nvfp4

# Named after the format of the activations, except the 4-bit ones, whose activations are not quantized.
ExpertFormat = Literal["plain", "per_token", "1x128", "nvfp4", "mxfp4"]
FP4_GROUPS: dict[ExpertFormat, int] = {"nvfp4": NVFP4_GROUP, "mxfp4": MXFP4_GROUP}  # inputs that share a scale


class ExpertWeights(NamedTuple):
    """Stacked weights of all experts of this rank."""

    format: ExpertFormat
    values: Tensor  # [E, O, I]; 4-bit formats pack two values per byte, swizzled (`e2m1.py`): [E, O, I / 2]
    # per_token: [E, O] fp32; 1x128: [E, O / 128, I / 128] fp32; nvfp4: [E, O, I / 16] e4m3; mxfp4: [E, O, I / 32] e8m0
    scales: Tensor | None = None
    scales_2: Tensor | None = None  # nvfp4: [E, O] fp32, the per-tensor scale of the matrix that an output belongs to
    bias: Tensor | None = None  # [E, O], unquantized

    @property
    def quant_format(self) -> QuantFormat:
        """Format of the activations that it is multiplied with."""
        return "plain" if self.format == "nvfp4" or self.format == "mxfp4" else self.format

    @property
    def inputs(self) -> int:
        return self.values.shape[2] * (2 if self.format in FP4_GROUPS else 1)


def empty_expert_weights(
    shape: tuple[int, int, int], format: ExpertFormat, dtype: torch.dtype, device: torch.device
) -> ExpertWeights:
    """Allocate weights [E, O, I]; `dtype` is that of unquantized ones. Blocks and groups must be whole."""
    experts, outputs, inputs = shape

    def empty(dtype: torch.dtype, *size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    if format == "plain":
        return ExpertWeights(format, empty(dtype, *shape))
    if format == "per_token":
        return ExpertWeights(format, empty(E4M3, *shape), empty(torch.float32, experts, outputs))
    if format == "1x128":
        assert outputs % GROUP == inputs % GROUP == 0
        scales = empty(torch.float32, experts, outputs // GROUP, inputs // GROUP)
        return ExpertWeights(format, empty(E4M3, *shape), scales)
    assert inputs % SWIZZLE_GROUP == 0
    packed = empty(torch.uint8, experts, outputs, inputs // 2)
    if format == "mxfp4":
        return ExpertWeights(format, packed, empty(torch.uint8, experts, outputs, inputs // MXFP4_GROUP))
    scales = empty(E4M3, experts, outputs, inputs // NVFP4_GROUP)
    return ExpertWeights(format, packed, scales, empty(torch.float32, experts, outputs))


def fill_expert_rows(
    weights: ExpertWeights, expert: int, start: int, weight_OI: Tensor, per_tensor: bool = False
) -> None:
    """Quantize a matrix into an expert's outputs from `start` on; `per_tensor`: its outputs have one common scale."""
    rows = slice(start, start + len(weight_OI))
    if weights.scales is None:
        weights.values[expert, rows] = weight_OI
    elif weights.format == "per_token":
        if per_tensor:
            quantized = quantize_activation.reference(weight_OI.reshape(1, -1), "per_token")
        else:
            quantized = quantize_activation(weight_OI, "per_token")
        assert isinstance(quantized, PerTokenFp8)
        weights.values[expert, rows] = quantized.values.view(weight_OI.shape)
        weights.scales[expert, rows] = quantized.scales.squeeze(-1)
    elif weights.format == "1x128":
        blocks = quantize_blocks(weight_OI)
        weights.values[expert, rows] = blocks.values
        weights.scales[expert, start // GROUP : rows.stop // GROUP] = blocks.scales[:, : weights.scales.shape[-1]]
    elif weights.format == "mxfp4":
        mxfp4 = quantize_mxfp4(weight_OI)
        weights.values[expert, rows], weights.scales[expert, rows] = swizzle_e2m1(mxfp4.packed), mxfp4.scales
    else:
        assert weights.scales_2 is not None
        nvfp4 = quantize_nvfp4(weight_OI)
        weights.values[expert, rows], weights.scales[expert, rows] = swizzle_e2m1(nvfp4.packed), nvfp4.scales
        weights.scales_2[expert, rows] = nvfp4.scale


def dequantize_expert(weights: ExpertWeights, expert: int) -> Tensor:
    """Return one expert's matrix in fp32."""
    values = weights.values[expert]
    if weights.scales is None:
        return values.float()
    scales = weights.scales[expert]
    if weights.format == "per_token":
        return values.float() * scales[:, None]
    if weights.format == "1x128":
        return dequantize_blocks(BlockScaledWeight(values, scales), len(values))
    if weights.format == "mxfp4":
        return dequantize_mxfp4(Mxfp4(unswizzle_e2m1(values), scales))
    assert weights.scales_2 is not None
    return dequantize_nvfp4(Nvfp4(unswizzle_e2m1(values), scales, weights.scales_2[expert, :, None]))
