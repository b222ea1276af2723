"""The linear layers of a block, each with what stands before it, there and back.

    linears = PlainLinears(model, weights)                                      # of one layer
    linears.project(inp_NC, (q_NA, k_NW, v_NW))                                 # norm, then queries, keys, values
    linears.output(attn_NA, inp_NC, resid_NC)                                   # added to the stream
    linears.gate_and_up(resid_NC, h13_N2F)                                      # norm, then gate and up
    linears.down(h13_N2F, resid_NC, out_NC, keep=True)                          # activation, then added to the stream

The ways back go in the other order. Between the layers is the attention, which is the block's own. Another number
format is another class with the same calls (`fp8_linears.py`): what makes the input of a product must know its format.

Shapes as in `layer_tensors.py`.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from llmb.config.spec import Model
from llmb.models.llama_layer.layer_tensors import BlockWeights, Inputs, Rest
from llmb.models.llama_layer.linear_gemms import Products
from llmb.ops.activation.swiglu import swiglu, swiglu_backward
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward

Weights = TypeVar("Weights", contravariant=True)


class Linears(Protocol):
    """Of one layer over one chunk. Gradients are set if fresh, otherwise added to."""

    def project(self, inp_NC: Tensor, outs: Sequence[Tensor]) -> None:
        """The normed stream through as many of the three matrices as there are outs."""

    def output(self, attn_NA: Tensor, inp_NC: Tensor, out_NC: Tensor) -> None:
        """The stream with the attention's share."""

    def gate_and_up(self, resid_NC: Tensor, out_N2F: Tensor) -> None:
        """The normed stream through both matrices."""

    def down(self, h13_N2F: Tensor, resid_NC: Tensor, out_NC: Tensor, keep: bool) -> None:
        """The stream with the MLP's share; `out` may be `resid`. Gate and up are used up unless they are kept."""

    def mlp_backward(self, grads: BlockWeights, fresh: bool, rest: Rest, dstream_NC: Tensor, out_NC: Tensor) -> None:
        """`out`, which may be `dstream`, becomes the slope of `resid`. Gate and up are used up."""

    def output_backward(
        self, grads: BlockWeights, fresh: bool, attn_NA: Tensor, dstream_NC: Tensor, out_NA: Tensor
    ) -> None:
        """`out` becomes the slope of the attention."""

    def project_backward(
        self, grads: BlockWeights, fresh: bool, dqkv_NX: Tensor, inp_NC: Tensor, dstream_NC: Tensor, room_NC: Tensor
    ) -> None:
        """The slope of `inp` is added to `dstream`; `room` is memory for what comes in between."""


class LinearsOf(Protocol[Weights]):
    """What makes them of a layer's weights. Given `inputs`, products leave there what they take on the way forward,
    and on the way back find it there; without, it is made again."""

    def __call__(self, model: Model, weights: Weights, inputs: Inputs | None = None, /) -> Linears:
        """For one chunk."""


class PlainLinears:
    """In the format of the stream."""

    def __init__(self, model: Model, weights: BlockWeights, inputs: Inputs | None = None):
        self.model, self.weights, self.inputs, self.products = model, weights, inputs, Products()
        self.widths = (model.heads * model.head_dim, *(2 * [model.kv_heads * model.head_dim]))

    def project(self, inp_NC: Tensor, outs: Sequence[Tensor]) -> None:
        """Three products, each where it belongs, instead of one and three copies."""
        x_NC = self._kept("x1", rms_norm(inp_NC, self.weights.norm1_C, self.model.norm_eps))
        for weight, out in zip(self.weights.wqkv_XC.split(self.widths), outs, strict=False):
            self.products.forward(x_NC, weight, out)

    def output(self, attn_NA: Tensor, inp_NC: Tensor, out_NC: Tensor) -> None:
        self.products.forward(attn_NA, self.weights.wo_CA, out_NC, onto=inp_NC)

    def gate_and_up(self, resid_NC: Tensor, out_N2F: Tensor) -> None:
        x_NC = self._kept("x2", rms_norm(resid_NC, self.weights.norm2_C, self.model.norm_eps))
        self.products.forward(x_NC, self.weights.w13_2FC, out_N2F)

    def down(self, h13_N2F: Tensor, resid_NC: Tensor, out_NC: Tensor, keep: bool) -> None:
        act_NF = self._kept("act", swiglu(h13_N2F, out=None if keep else h13_N2F[:, : self.model.ffn]))
        self.products.forward(act_NF, self.weights.w2_CF, out_NC, onto=resid_NC)

    def mlp_backward(self, grads: BlockWeights, fresh: bool, rest: Rest, dstream_NC: Tensor, out_NC: Tensor) -> None:
        act_NF, x_NC = self._found("act"), self._found("x2")
        dact_NF = self.products.input_gradient(dstream_NC, self.weights.w2_CF)
        swiglu_backward(dact_NF, rest.h13_N2F, again=act_NF is None)
        self.products.weight_gradient(dstream_NC, dact_NF if act_NF is None else act_NF, grads.w2_CF, fresh)
        del dact_NF, act_NF
        if x_NC is None:
            x_NC = rms_norm(rest.resid_NC, self.weights.norm2_C, self.model.norm_eps)
        self.products.weight_gradient(rest.h13_N2F, x_NC, grads.w13_2FC, fresh)
        # The normed stream is done with.
        dx_NC = self.products.input_gradient(rest.h13_N2F, self.weights.w13_2FC, out=x_NC)
        rms_norm_backward(dx_NC, rest.resid_NC, self.weights.norm2_C, self.model.norm_eps, dstream_NC, out_NC,
                          grads.norm2_C, fresh)  # fmt: skip

    def output_backward(
        self, grads: BlockWeights, fresh: bool, attn_NA: Tensor, dstream_NC: Tensor, out_NA: Tensor
    ) -> None:
        self.products.weight_gradient(dstream_NC, attn_NA, grads.wo_CA, fresh)
        self.products.input_gradient(dstream_NC, self.weights.wo_CA, out=out_NA)

    def project_backward(
        self, grads: BlockWeights, fresh: bool, dqkv_NX: Tensor, inp_NC: Tensor, dstream_NC: Tensor, room_NC: Tensor
    ) -> None:
        x_NC = self._found("x1")
        if x_NC is None:
            x_NC = rms_norm(inp_NC, self.weights.norm1_C, self.model.norm_eps, out=room_NC)
        self.products.weight_gradient(dqkv_NX, x_NC, grads.wqkv_XC, fresh)
        self.products.input_gradient(dqkv_NX, self.weights.wqkv_XC, out=room_NC)
        rms_norm_backward(room_NC, inp_NC, self.weights.norm1_C, self.model.norm_eps, dstream_NC, dstream_NC,
                          grads.norm1_C, fresh)  # fmt: skip

    def _kept(self, name: str, x: Tensor) -> Tensor:
        if self.inputs is not None:
            self.inputs[name] = x
        return x

    def _found(self, name: str) -> Tensor | None:
        """Given away: it is gone when its last product is made."""
        return None if self.inputs is None else self.inputs.pop(name)
