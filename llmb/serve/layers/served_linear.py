"""Linear layers of a served model in each number format; a layer says in which form it wants its input.

    layer = linear(weight_OK, format="fp8_block", dtype=torch.bfloat16)
    out_NO = layer(in_form(x_NK, layer.form))

A weight comes as plain numbers and is rounded here, so that one read from a file in the same format gets the values of
the file back. A layer whose shape the format's products cannot take stays plain: `fitting` decides.

Shapes: N tokens, K inputs, O outputs.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.gemm.block_scaled_gemm import block_product, in_blocks
from llmb.ops.gemm.fp8_linear import MULTIPLE, cast, scale_of
from llmb.ops.gemm.skinny_gemm import ThinWeight, is_thin, thin_product
from llmb.ops.quant.activation_quant import E4M3, GROUP, Activation, Form, Groups8, Rows8, in_form
from llmb.ops.quant.nvfp4 import NVFP4_GROUP, from_nvfp4, in_nvfp4
from llmb.serve.rank_groups import Group

Format = Literal["plain", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"]
Parts = tuple[Tensor, ...]  # weights that read the same input, each [O, K]


class Linear(Protocol):
    """x @ weight.T."""

    form: Form
    dequantised: bool  # the device has no product of the format that the weight was rounded to; it is kept wider

    @property
    def thin(self) -> ThinWeight | None:
        """The weight as products for a handful of tokens take it, in formats that they know."""
        ...

    @property
    def bytes(self) -> int:
        """What a step reads of memory for the weight, with its scales."""
        ...

    def __call__(self, x: Activation) -> Tensor:
        """[N, O] in the model's own format."""
        ...


def linear(*parts_OK: Tensor, format: Format, dtype: torch.dtype, input_scale: Tensor | None = None) -> Linear:
    """The layer of a weight that is given as plain numbers; `dtype` is what comes out.

    Several weights that read the same input become one layer, their outputs one after the other; each is rounded by
    itself, as if it stood alone. `input_scale` (fp32, a scalar) is for fp8_tensor: activations are divided by it and
    not by one found at each use.
    """
    format = fitting(format, sum(len(part) for part in parts_OK), parts_OK[0].shape[1])
    if format == "fp8_tensor":
        return TensorLinear(parts_OK, dtype, input_scale)
    return FORMATS[format](parts_OK, dtype)


def thin_onto(stream_NC: Tensor, x_NK: Tensor, weight: ThinWeight, group: Group) -> Tensor:
    """The stream with a block's last product added to it, of which the ranks of a group have a part each."""
    onto_NC = stream_NC if group.index == 0 else None
    return group.sum(thin_product(x_NK, weight, stream_NC.dtype, onto_NO=onto_NC))


def fitting(format: Format, outputs: int, inputs: int) -> Format:
    """The format, or plain where its products cannot take the shape; decided for all devices alike."""
    fits = {
        "plain": True,
        "fp8_tensor": inputs % MULTIPLE == 0 and outputs % MULTIPLE == 0,
        "fp8_channel": inputs % MULTIPLE == 0 and outputs % MULTIPLE == 0,
        "fp8_block": inputs % GROUP == 0,
        "nvfp4": inputs % NVFP4_GROUP == 0,
    }
    return format if fits[format] else "plain"


class PlainLinear:
    """In the format of the stream."""

    form: Form = "plain"
    dequantised = False

    def __init__(self, parts_OK: Parts, dtype: torch.dtype):
        self.weight_OK = torch.cat([part.to(dtype) for part in parts_OK])
        self.thin = ThinWeight(self.weight_OK)

    @property
    def bytes(self) -> int:
        return self.weight_OK.nbytes

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        return thin_product(x, self.thin, x.dtype) if is_thin(x) else F.linear(x, self.weight_OK)


class _ScaledOutputs:
    """8-bit weights with a scale for each output, which meet 8-bit activations with a scale for each token."""

    dequantised = False

    def __init__(self, values_OK: Tensor, scales_1O: Tensor, dtype: torch.dtype):
        self.values_OK, self.scales_1O, self.dtype = values_OK, scales_1O, dtype
        self.thin = ThinWeight(values_OK, scales_1O[0])

    @property
    def bytes(self) -> int:
        return self.values_OK.nbytes + self.scales_1O.nbytes

    def product(self, x: Rows8) -> Tensor:
        if x.values.is_cuda:
            scales = (x.scales.contiguous(), self.scales_1O)
            return torch._scaled_mm(x.values, self.values_OK.T, *scales, out_dtype=self.dtype, use_fast_accum=True)
        return (F.linear(x.values.float(), self.values_OK.float()) * (x.scales * self.scales_1O)).to(self.dtype)


class TensorLinear(_ScaledOutputs):
    """8-bit weights and activations with one scale each; weights that were put together keep their own.

    The scale of an activation is that of all tokens of a step together, found at each use in a pass of its own, so what
    a sequence gets depends on its neighbours; a known `input_scale` spares both.
    """

    form: Form = "plain"

    def __init__(self, parts_OK: Parts, dtype: torch.dtype, input_scale: Tensor | None = None):
        rounded = [cast(part, scale_of(part, E4M3), E4M3, rows=True) for part in parts_OK]
        scales_O = torch.cat([part.scale.expand(len(part.rows)) for part in rounded])
        super().__init__(torch.cat([part.rows for part in rounded]), scales_O[None], dtype)
        self.input_scale = None if input_scale is None else input_scale.to(self.values_OK.device, torch.float32)

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        if self.input_scale is None:
            x8 = cast(x, scale_of(x, E4M3), E4M3, rows=True)
        else:  # what is beyond the largest number of the format is clipped, not lost
            limit = self.input_scale * torch.finfo(E4M3).max
            x8 = cast(x.clamp(-limit, limit), self.input_scale, E4M3, rows=True)
        return self.product(Rows8(x8.rows, x8.scale.expand(len(x), 1)))


class ChannelLinear(_ScaledOutputs):
    """8-bit weights with a scale for each output, 8-bit activations with a scale for each token."""

    form: Form = "rows8"

    def __init__(self, parts_OK: Parts, dtype: torch.dtype):
        rounded = in_form(torch.cat(parts_OK), "rows8")
        assert isinstance(rounded, Rows8)
        super().__init__(rounded.values, rounded.scales.T.contiguous(), dtype)

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, Rows8)
        if is_thin(x.values):
            return thin_product(x, self.thin, self.dtype)
        return self.product(x)


class BlockLinear:
    """8-bit weights with a scale for each 128 x 128, 8-bit activations with one for each 128 channels of a token."""

    form: Form = "groups8"
    dequantised = False
    thin = None

    def __init__(self, parts_OK: Parts, dtype: torch.dtype):
        together_OK = torch.cat(parts_OK)
        self.weight, self.outputs, self.dtype = in_blocks(together_OK), len(together_OK), dtype

    @property
    def bytes(self) -> int:
        return self.weight.values.nbytes + self.weight.scales.nbytes

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, Groups8)
        return block_product(x, self.weight, self.outputs, self.dtype)


class Nvfp4Linear(PlainLinear):
    """The numbers of 4-bit weights, kept in the format of the stream; activations are plain.

    They are widened once, when the layer is made: at each use it would cost more than reading them wide.
    """

    dequantised = True

    def __init__(self, parts_OK: Parts, dtype: torch.dtype):
        super().__init__(tuple(from_nvfp4(in_nvfp4(part)) for part in parts_OK), dtype)


FORMATS: dict[Format, Callable[[Parts, torch.dtype], Linear]] = {
    "plain": PlainLinear,
    "fp8_channel": ChannelLinear,
    "fp8_block": BlockLinear,
    "nvfp4": Nvfp4Linear,
}
