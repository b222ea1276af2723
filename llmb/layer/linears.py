"""The linear layers of a block, each with what stands before it, there and back.

    linears.project(weights, inp_NC, (q_NA, k_NW, v_NW))                        # norm, then queries, keys, values
    linears.output(weights, attn_NA, resid_NC)                                  # to be added to the stream
    linears.gate_and_up(weights, inp_NC, resid_NC, h13_N2F)                     # added, norm, then gate and up
    linears.down(weights, h13_N2F, resid_NC, out_NC, keep=True)                 # activation, then added to the stream

The ways back go in the other order. Between the layers is the attention, which is the block's own. Another number
format is another class with the same calls (`fp8_linears.py`): what makes the input of a product must know its format.

Shapes as in `tensors.py`.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from llmb.kernels.rms_norm import rms_norm, rms_norm_backward
from llmb.kernels.swiglu import swiglu, swiglu_backward
from llmb.layer.products import Products
from llmb.layer.tensors import BlockWeights, Rest
from llmb.spec import Model

Weights = TypeVar("Weights", contravariant=True)


class Linears(Protocol[Weights]):
    """Of all layers; the weights of one come with each call. Gradients are set if fresh, otherwise added to."""

    def project(self, weights: Weights, inp_NC: Tensor, outs: Sequence[Tensor]) -> None:
        """The normed stream through as many of the three matrices as there are outs."""

    def output(self, weights: Weights, attn_NA: Tensor, out_NC: Tensor) -> None:
        """The attention's share of the stream."""

    def gate_and_up(self, weights: Weights, inp_NC: Tensor, resid_NC: Tensor, out_N2F: Tensor) -> None:
        """`resid`, so far a share, becomes the stream with it; normed through both matrices."""

    def down(self, weights: Weights, h13_N2F: Tensor, resid_NC: Tensor, out_NC: Tensor, keep: bool) -> None:
        """The MLP's share of the stream; `out` may be `resid`. Gate and up are used up unless they are kept."""

    def mlp_backward(
        self, weights: Weights, grads: BlockWeights, fresh: bool, rest: Rest, dstream_NC: Tensor, out_NC: Tensor
    ) -> None:
        """`out`, which may be `dstream`, becomes the slope of `resid`. Gate and up are used up."""

    def output_backward(
        self, weights: Weights, grads: BlockWeights, fresh: bool, attn_NA: Tensor, dstream_NC: Tensor, out_NA: Tensor
    ) -> None:
        """`out` becomes the slope of the attention."""

    def project_backward(
        self,
        weights: Weights,
        grads: BlockWeights,
        fresh: bool,
        dqkv_NX: Tensor,
        inp_NC: Tensor,
        dstream_NC: Tensor,
        room_NC: Tensor,
    ) -> None:
        """The slope of `inp` is added to `dstream`; `room` is memory for what comes in between."""


class PlainLinears:
    """In the format of the stream."""

    def __init__(self, model: Model):
        self.model, self.products = model, Products()
        self.widths = (model.heads * model.head_dim, *(2 * [model.kv_heads * model.head_dim]))

    def project(self, weights: BlockWeights, inp_NC: Tensor, outs: Sequence[Tensor]) -> None:
        """Three products, each where it belongs, instead of one and three copies."""
        x_NC = rms_norm(inp_NC, weights.norm1_C, self.model.norm_eps)
        for weight, out in zip(weights.wqkv_XC.split(self.widths), outs, strict=False):
            self.products.forward(x_NC, weight, out)

    def output(self, weights: BlockWeights, attn_NA: Tensor, out_NC: Tensor) -> None:
        self.products.forward(attn_NA, weights.wo_CA, out_NC)

    def gate_and_up(self, weights: BlockWeights, inp_NC: Tensor, resid_NC: Tensor, out_N2F: Tensor) -> None:
        x_NC = rms_norm(resid_NC, weights.norm2_C, self.model.norm_eps, added=inp_NC)
        self.products.forward(x_NC, weights.w13_2FC, out_N2F)

    def down(self, weights: BlockWeights, h13_N2F: Tensor, resid_NC: Tensor, out_NC: Tensor, keep: bool) -> None:
        act_NF = swiglu(h13_N2F, out=None if keep else h13_N2F[:, : self.model.ffn])
        self.products.forward(act_NF, weights.w2_CF, out_NC, onto=resid_NC)

    def mlp_backward(
        self, weights: BlockWeights, grads: BlockWeights, fresh: bool, rest: Rest, dstream_NC: Tensor, out_NC: Tensor
    ) -> None:
        act_NF = self.products.input_gradient(dstream_NC, weights.w2_CF)  # the activation's slope, until the next line
        swiglu_backward(act_NF, rest.h13_N2F)
        self.products.weight_gradient(dstream_NC, act_NF, grads.w2_CF, fresh)
        del act_NF
        x_NC = rms_norm(rest.resid_NC, weights.norm2_C, self.model.norm_eps)
        self.products.weight_gradient(rest.h13_N2F, x_NC, grads.w13_2FC, fresh)
        dx_NC = self.products.input_gradient(rest.h13_N2F, weights.w13_2FC, out=x_NC)  # the normed stream is done with
        rms_norm_backward(dx_NC, rest.resid_NC, weights.norm2_C, self.model.norm_eps, dstream_NC, out_NC,
                          grads.norm2_C, fresh)  # fmt: skip

    def output_backward(
        self,
        weights: BlockWeights,
        grads: BlockWeights,
        fresh: bool,
        attn_NA: Tensor,
        dstream_NC: Tensor,
        out_NA: Tensor,
    ) -> None:
        self.products.weight_gradient(dstream_NC, attn_NA, grads.wo_CA, fresh)
        self.products.input_gradient(dstream_NC, weights.wo_CA, out=out_NA)

    def project_backward(
        self,
        weights: BlockWeights,
        grads: BlockWeights,
        fresh: bool,
        dqkv_NX: Tensor,
        inp_NC: Tensor,
        dstream_NC: Tensor,
        room_NC: Tensor,
    ) -> None:
        rms_norm(inp_NC, weights.norm1_C, self.model.norm_eps, out=room_NC)
        self.products.weight_gradient(dqkv_NX, room_NC, grads.wqkv_XC, fresh)
        self.products.input_gradient(dqkv_NX, weights.wqkv_XC, out=room_NC)
        rms_norm_backward(room_NC, inp_NC, weights.norm1_C, self.model.norm_eps, dstream_NC, dstream_NC,
                          grads.norm1_C, fresh)  # fmt: skip
