"""Linear layers of a served model in each weight format; a layer has the quantization format of its input.

    layer = build_linear(weight_OK, format="fp8_block", dtype=torch.bfloat16)
    out_NO = layer(quantize_activation(x_NK, layer.input_format))

Weights come unquantized and are quantized here, so that a weight read from a file in the same format gets the values of
the file back. A layer whose shape the format's gemm does not support stays plain: see `supported_format`.

Shapes: N tokens, K inputs, O outputs.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.gemm.block_scaled_gemm import block_scaled_gemm, quantize_blocks
from llmb.ops.gemm.skinny_gemm import SkinnyGemmWeight, skinny_gemm, takes_skinny_gemm
from llmb.ops.gemm.split_k_gemm import SplitKWeight, split_k_gemm, takes_split_k_gemm
from llmb.ops.quant.activation_quant import (
    E4M3,
    GROUP,
    Activation,
    GroupFp8,
    PerTokenFp8,
    QuantFormat,
    quantize_activation,
)
from llmb.ops.quant.fp8_quant import FP8_ALIGNMENT, cast_to_fp8, tensor_scale
from llmb.ops.quant.mxfp4 import MXFP4_GROUP
from llmb.ops.quant.nvfp4 import NVFP4_GROUP, dequantize_nvfp4, quantize_nvfp4
from llmb.serve.rank_groups import RankGroup

Format = Literal["plain", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4", "mxfp4"]
FusedWeights = tuple[Tensor, ...]  # weights with the same input, each [O, K]


class ServedLinear(Protocol):
    """x @ weight.T."""

    input_format: QuantFormat
    dequantised: bool  # the weight was quantized, but is stored unquantized as there is no gemm for its format

    @property
    def skinny_weight(self) -> SkinnyGemmWeight | None:
        """The weight as skinny gemms take it; None if they do not support its format."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the weight and its scales, read by every step."""
        ...

    def __call__(self, x: Activation) -> Tensor:
        """Return [N, O] in the model's dtype."""
        ...


def build_linear(
    *weights_OK: Tensor, format: Format, dtype: torch.dtype, input_scale: Tensor | None = None
) -> ServedLinear:
    """Build the layer of unquantized weights, with outputs of `dtype`.

    Weights with the same input are fused into one layer with concatenated outputs; each is quantized on its own.
    `input_scale` (fp32, a scalar) is a static activation scale for fp8_tensor.
    """
    format = supported_format(format, sum(len(weight) for weight in weights_OK), weights_OK[0].shape[1])
    if format == "fp8_tensor":
        return Fp8TensorLinear(weights_OK, dtype, input_scale)
    return FORMATS[format](weights_OK, dtype)


def add_skinny_gemm(residual_NC: Tensor, x_NK: Tensor, weight: SkinnyGemmWeight, group: RankGroup) -> Tensor:
    """Return the residual plus a row-parallel gemm; the first rank adds the residual before the all-reduce."""
    addend_NC = residual_NC if group.index == 0 else None
    return group.all_reduce(skinny_gemm(x_NK, weight, residual_NC.dtype, addend_NO=addend_NC))


def supported_format(format: Format, outputs: int, inputs: int) -> Format:
    """Return the format, or plain if its gemm does not support the shape; the same on all devices."""
    fits = {
        "plain": True,
        "fp8_tensor": inputs % FP8_ALIGNMENT == 0 and outputs % FP8_ALIGNMENT == 0,
        "fp8_channel": inputs % FP8_ALIGNMENT == 0 and outputs % FP8_ALIGNMENT == 0,
        "fp8_block": inputs % GROUP == 0,
        "nvfp4": inputs % NVFP4_GROUP == 0,
        "mxfp4": inputs % MXFP4_GROUP == 0,
    }
    return format if fits[format] else "plain"


class UnquantizedLinear:
    """Weights in the model's dtype."""

    input_format: QuantFormat = "plain"
    dequantised = False

    def __init__(self, weights_OK: FusedWeights, dtype: torch.dtype):
        self.weight_OK = torch.cat([weight.to(dtype) for weight in weights_OK])
        self.skinny_weight = SkinnyGemmWeight(self.weight_OK)

    @property
    def bytes(self) -> int:
        return self.weight_OK.nbytes

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        return skinny_gemm(x, self.skinny_weight, x.dtype) if takes_skinny_gemm(x) else F.linear(x, self.weight_OK)


class _ScaledFp8Linear:
    """FP8 gemm of per-channel scaled weights and per-token scaled activations."""

    dequantised = False

    def __init__(self, values_OK: Tensor, scales_1O: Tensor, dtype: torch.dtype):
        self.values_OK, self.scales_1O, self.dtype = values_OK, scales_1O, dtype
        self.skinny_weight = SkinnyGemmWeight(values_OK, scales_1O[0])
        self._split_k_weight = SplitKWeight.of(values_OK, scales_1O[0])

    @property
    def bytes(self) -> int:
        return self.values_OK.nbytes + self.scales_1O.nbytes

    def gemm(self, x: PerTokenFp8) -> Tensor:
        if takes_split_k_gemm(x):
            return split_k_gemm(x, self._split_k_weight, self.dtype)
        if x.values.is_cuda:
            scales = (x.scales.contiguous(), self.scales_1O)
            return torch._scaled_mm(x.values, self.values_OK.T, *scales, out_dtype=self.dtype, use_fast_accum=True)
        return (F.linear(x.values.float(), self.values_OK.float()) * (x.scales * self.scales_1O)).to(self.dtype)


class Fp8TensorLinear(_ScaledFp8Linear):
    """FP8 weights and activations with per-tensor scales; fused weights keep a scale each.

    A dynamic activation scale is that of all tokens of a step and takes a pass of its own, so the output of a sequence
    depends on the others in the batch; a static `input_scale` avoids both.
    """

    input_format: QuantFormat = "plain"

    def __init__(self, weights_OK: FusedWeights, dtype: torch.dtype, input_scale: Tensor | None = None):
        quantized = [cast_to_fp8(weight, tensor_scale(weight, E4M3), E4M3, rows=True) for weight in weights_OK]
        scales_O = torch.cat([weight.scale.expand(len(weight.rows)) for weight in quantized])
        super().__init__(torch.cat([weight.rows for weight in quantized]), scales_O[None], dtype)
        self.input_scale = None if input_scale is None else input_scale.to(self.values_OK.device, torch.float32)

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        if self.input_scale is None:
            x8 = cast_to_fp8(x, tensor_scale(x, E4M3), E4M3, rows=True)
        else:  # values beyond the largest fp8 number saturate
            limit = self.input_scale * torch.finfo(E4M3).max
            x8 = cast_to_fp8(x.clamp(-limit, limit), self.input_scale, E4M3, rows=True)
        return self.gemm(PerTokenFp8(x8.rows, x8.scale.expand(len(x), 1)))


class Fp8ChannelLinear(_ScaledFp8Linear):
    """FP8 weights with per-channel scales, activations with per-token scales."""

    input_format: QuantFormat = "per_token"

    def __init__(self, weights_OK: FusedWeights, dtype: torch.dtype):
        quantized = quantize_activation(torch.cat(weights_OK), "per_token")
        assert isinstance(quantized, PerTokenFp8)
        super().__init__(quantized.values, quantized.scales.T.contiguous(), dtype)

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, PerTokenFp8)
        if takes_skinny_gemm(x.values):
            return skinny_gemm(x, self.skinny_weight, self.dtype)
        return self.gemm(x)


class Fp8BlockLinear:
    """FP8 weights with 128x128 block scales, activations with 1x128 group scales."""

    input_format: QuantFormat = "1x128"
    dequantised = False
    skinny_weight = None

    def __init__(self, weights_OK: FusedWeights, dtype: torch.dtype):
        weight_OK = torch.cat(weights_OK)
        self.weight, self.outputs, self.dtype = quantize_blocks(weight_OK), len(weight_OK), dtype

    @property
    def bytes(self) -> int:
        return self.weight.values.nbytes + self.weight.scales.nbytes

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, GroupFp8)
        return block_scaled_gemm(x, self.weight, self.outputs, self.dtype)


class Nvfp4Linear(UnquantizedLinear):
    """NVFP4 weights, dequantized to the model's dtype when the layer is built; activations are not quantized.

    Dequantizing them at each use would cost more than it saves in reads.
    """

    dequantised = True

    def __init__(self, weights_OK: FusedWeights, dtype: torch.dtype):
        super().__init__(tuple(dequantize_nvfp4(quantize_nvfp4(weight)) for weight in weights_OK), dtype)


FORMATS: dict[Format, Callable[[FusedWeights, torch.dtype], ServedLinear]] = {
    "plain": UnquantizedLinear,
    "fp8_channel": Fp8ChannelLinear,
    "fp8_block": Fp8BlockLinear,
    "nvfp4": Nvfp4Linear,
    "mxfp4": UnquantizedLinear,  # MXFP4 models quantize experts only
}
