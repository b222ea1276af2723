"""The linear layers of a block with 8-bit operands: whatever makes an operand writes it in 8 bits at once.

    linears = Fp8Linears(model, layer)                      # a Fp8Layer of `fp8_layer_weights.py`
    linears.project(inp_NC, (q_NA, k_NW, v_NW))             # as `linears.py`

Norm, activation and its way back write 8 bits in the form that the next product takes; the attention, its slopes and
those of the stream come from elsewhere and are cast. Inputs that are kept are made in both forms at once, except for
the activation, of which that would spare nothing. Scales are those of the steps before. The stream stays in bf16,
and gradients are in the format that they are given in.

Shapes as in `layer_tensors.py`; P tokens with zeros up to a multiple of 16.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.models.llama_layer.fp8_layer_weights import FORMATS, Fp8Layer
from llmb.models.llama_layer.layer_tensors import BlockWeights, Inputs, Rest
from llmb.models.llama_layer.linear_gemms import Fp8Products
from llmb.ops.activation.swiglu_fp8 import swiglu_backward_fp8, swiglu_fp8
from llmb.ops.gemm.fp8_linear import Fp8
from llmb.ops.norm.rms_norm import rms_norm_backward
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8
from llmb.ops.quant.fp8_quant import cast_both, padded

Making = Callable[..., None]  # of a tensor in 8 bits, from its gauge and the memory of both forms


class Fp8Linears:
    """As `linears.Linears`."""

    def __init__(self, model: Model, layer: Fp8Layer, inputs: Inputs | None = None, fast_sums: bool = False):
        self.model, self.layer, self.inputs, self.products = model, layer, inputs, Fp8Products(fast_sums)
        self.widths = (model.heads * model.head_dim, *(2 * [model.kv_heads * model.head_dim]))

    def project(self, inp_NC: Tensor, outs: Sequence[Tensor]) -> None:
        x, weight = self._taken("x1", self._norm(inp_NC, self.layer.norm1_C), inp_NC), self.layer.rows("wqkv")
        for part, out in zip(weight.rows.split(self.widths), outs, strict=False):
            self.products.forward(x, weight._replace(rows=part), out)

    def output(self, attn_NA: Tensor, inp_NC: Tensor, out_NC: Tensor) -> None:
        attn = self._taken("attn", partial(cast_both, attn_NA), attn_NA)
        self.products.forward(attn, self.layer.rows("wo"), out_NC, onto=inp_NC)

    def gate_and_up(self, resid_NC: Tensor, out_N2F: Tensor) -> None:
        x = self._taken("x2", self._norm(resid_NC, self.layer.norm2_C), resid_NC)
        self.products.forward(x, self.layer.rows("w13"), out_N2F)

    def down(self, h13_N2F: Tensor, resid_NC: Tensor, out_NC: Tensor, keep: bool) -> None:
        """Gate and up are left as they are in any case."""
        act = _made(self.layer, "act", partial(swiglu_fp8, h13_N2F), h13_N2F, self.model.ffn, rows=True)
        self.products.forward(act, self.layer.rows("w2"), out_NC, onto=resid_NC)

    def mlp_backward(self, grads: BlockWeights, fresh: bool, rest: Rest, dstream_NC: Tensor, out_NC: Tensor) -> None:
        dout = self._slope("dout", dstream_NC)
        dh13, act = self._activation_backward(dout, rest.h13_N2F)
        self.products.weight_gradient(dout, act, grads.w2_CF, fresh)
        del dout, act
        x = self._again("x2", self._norm(rest.resid_NC, self.layer.norm2_C), rest.resid_NC)
        self.products.weight_gradient(dh13, x, grads.w13_2FC, fresh)
        del x
        dx_NC = self.products.input_gradient(dh13, self.layer.columns("w13"), torch.empty_like(dstream_NC))
        rms_norm_backward(dx_NC, rest.resid_NC, self.layer.norm2_C, self.model.norm_eps, dstream_NC, out_NC,
                          grads.norm2_C, fresh)  # fmt: skip

    def output_backward(
        self, grads: BlockWeights, fresh: bool, attn_NA: Tensor, dstream_NC: Tensor, out_NA: Tensor
    ) -> None:
        dresid = self._slope("dresid", dstream_NC)
        self.products.input_gradient(dresid, self.layer.columns("wo"), out_NA)
        attn = self._again("attn", partial(cast_both, attn_NA), attn_NA)
        self.products.weight_gradient(dresid, attn, grads.wo_CA, fresh)

    def project_backward(
        self, grads: BlockWeights, fresh: bool, dqkv_NX: Tensor, inp_NC: Tensor, dstream_NC: Tensor, room_NC: Tensor
    ) -> None:
        dqkv = self._slope("dqkv", dqkv_NX)
        x = self._again("x1", self._norm(inp_NC, self.layer.norm1_C), inp_NC)
        self.products.weight_gradient(dqkv, x, grads.wqkv_XC, fresh)
        self.products.input_gradient(dqkv, self.layer.columns("wqkv"), room_NC)
        rms_norm_backward(room_NC, inp_NC, self.layer.norm1_C, self.model.norm_eps, dstream_NC, dstream_NC,
                          grads.norm1_C, fresh)  # fmt: skip

    def _norm(self, x_NC: Tensor, weight_C: Tensor) -> Making:
        return partial(rms_norm_fp8, x_NC, weight_C, self.model.norm_eps)

    def _taken(self, name: str, make: Making, like: Tensor) -> Fp8:
        """By a product going forward; what its way back takes is kept if anything is."""
        made = _made(self.layer, name, make, like, like.shape[1], rows=True, columns=self.inputs is not None)
        if self.inputs is not None:
            self.inputs[name] = made._replace(rows=made.rows.new_empty(0))
        return made

    def _again(self, name: str, make: Making, like: Tensor) -> Fp8:
        """By its way back. What was kept is given away: it is gone when its product is made."""
        if self.inputs is not None:
            return self.inputs.pop(name)
        return _made(self.layer, name, make, like, like.shape[1], columns=True)

    def _slope(self, name: str, x_NK: Tensor) -> Fp8:
        return _made(self.layer, name, partial(cast_both, x_NK), x_NK, x_NK.shape[1], rows=True, columns=True)

    def _activation_backward(self, dout: Fp8, h13_N2F: Tensor) -> tuple[Fp8, Fp8]:
        """The slope of gate and up, and the activation, which the gradient of the last matrix takes."""
        n, f = len(h13_N2F), self.model.ffn
        dact_NF = self.products.input_gradient(dout, self.layer.columns("w2"), h13_N2F.new_empty(n, f))
        make = partial(swiglu_backward_fp8, dact_NF, h13_N2F)
        slope, act = self.layer.gauges("dh13", "act", look=lambda slope, act: make(slope, None, None, act, None))
        slope_rows, slope_columns = _room("dh13", h13_N2F, 2 * f, True, True)
        act_rows, act_columns = _room("act", h13_N2F, f, False, True)
        make(slope, slope_rows, slope_columns, act, act_columns)
        return Fp8(slope_rows, slope_columns, slope.scale), Fp8(act_rows, act_columns, act.scale)


def _made(
    layer: Fp8Layer, name: str, make: Making, like: Tensor, k: int, rows: bool = False, columns: bool = False
) -> Fp8:
    """A tensor of so many channels in the forms asked for."""
    (gauge,) = layer.gauges(name, look=make)
    rows_NK, columns_KP = _room(name, like, k, rows, columns)
    make(gauge, rows_NK if rows else None, columns_KP if columns else None)
    return Fp8(rows_NK, columns_KP, gauge.scale)


def _room(name: str, like: Tensor, k: int, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Memory for both forms of a tensor; one that is not asked for is empty."""
    n, dtype = len(like), FORMATS[name]
    return (
        torch.empty((n, k) if rows else 0, dtype=dtype, device=like.device),
        torch.empty((k, padded(n)) if columns else 0, dtype=dtype, device=like.device),
    )
