"""Linear layers of a served model in each number format; a layer says in which form it wants its input.

Shapes: N tokens, K inputs, O outputs.
"""

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.kernels.forms import Activation, Form, Rows8, as_plain

Format = Literal["plain", "fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"]


class Linear(Protocol):
    """x @ weight.T."""

    form: Form

    def __call__(self, x: Activation) -> Tensor:
        """[N, O] in the model's own format."""
        ...


def linear(weight_OK: Tensor, format: Format, dtype: torch.dtype) -> Linear:
    """The layer of a weight that is given as plain numbers; `dtype` is what comes out."""
    return FORMATS[format](weight_OK, dtype)


class PlainLinear:
    """In the format of the stream."""

    form: Form = "plain"

    def __init__(self, weight_OK: Tensor, dtype: torch.dtype):
        self.weight_OK = weight_OK.to(dtype)

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self.weight_OK)


class ChannelLinear:
    """8-bit weights with a scale for each output, 8-bit activations with a scale for each token."""

    form: Form = "rows8"

    def __init__(self, weight_OK: Tensor, dtype: torch.dtype):
        from llmb.kernels.forms import in_form

        rounded = in_form(weight_OK, "rows8")
        assert isinstance(rounded, Rows8)
        self.values_OK, self.scales_1O = rounded.values, rounded.scales.T.contiguous()
        self.dtype = dtype

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, Rows8)
        if x.values.is_cuda:
            return torch._scaled_mm(
                x.values, self.values_OK.T, x.scales, self.scales_1O, out_dtype=self.dtype, use_fast_accum=True
            )
        return F.linear(as_plain(x, torch.float32), self.values_OK.float() * self.scales_1O.T).to(self.dtype)


FORMATS = {"plain": PlainLinear, "fp8_channel": ChannelLinear}
