"""The linear layers of a Llama layer, each with the norm or activation before it, forward and backward.

    linears = PlainLinears(model, weights)                                          # of one layer
    linears.qkv_proj(input_NC, (q_NA, k_NW, v_NW))                                  # norm, then queries, keys, values
    linears.o_proj(attn_NA, input_NC, residual_NC)                                  # added to the residual
    linears.gate_up_proj(residual_NC, gate_up_N2F)                                  # norm, then gate and up
    linears.down_proj(gate_up_N2F, residual_NC, out_NC, save=True)                  # SwiGLU, then added to the residual

The backward methods run in reverse order. The attention in between belongs to `layer.py`. Another precision is another
class with the same methods (`fp8_linears.py`): what produces the input of a GEMM must know its format.

Shapes as in `layer_tensors.py`.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from llmb.config.spec import Model
from llmb.models.llama_layer.layer_tensors import LayerWeights, SavedActivations, SavedInputs
from llmb.models.llama_layer.linear_gemms import LinearGemms
from llmb.ops.activation.activation import swiglu, swiglu_backward
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward

Weights = TypeVar("Weights", contravariant=True)


class LayerLinears(Protocol):
    """Linear layers of one layer over one chunk. Gradients are set, or added to with `accumulate`."""

    def qkv_proj(self, input_NC: Tensor, outs: Sequence[Tensor]) -> None:
        """Project the normed residual to as many of queries, keys and values as there are outs."""

    def o_proj(self, attn_NA: Tensor, input_NC: Tensor, out_NC: Tensor) -> None:
        """Add the projected attention to the residual."""

    def gate_up_proj(self, residual_NC: Tensor, out_N2F: Tensor) -> None:
        """Project the normed residual to gate and up."""

    def down_proj(self, gate_up_N2F: Tensor, residual_NC: Tensor, out_NC: Tensor, save: bool) -> None:
        """Add the MLP's output to the residual; `out` may be `residual`. Unless saved, gate and up are overwritten."""

    def mlp_backward(
        self, grads: LayerWeights, accumulate: bool, saved: SavedActivations, d_residual_NC: Tensor, out_NC: Tensor
    ) -> None:
        """Set `out`, which may be `d_residual`, to the gradient of `saved.residual`. Gate and up are overwritten."""

    def o_proj_backward(
        self, grads: LayerWeights, accumulate: bool, attn_NA: Tensor, d_residual_NC: Tensor, out_NA: Tensor
    ) -> None:
        """Set `out` to the gradient of the attention output."""

    def qkv_proj_backward(
        self,
        grads: LayerWeights,
        accumulate: bool,
        dqkv_NX: Tensor,
        input_NC: Tensor,
        d_residual_NC: Tensor,
        workspace_NC: Tensor,
    ) -> None:
        """Add the gradient of `input` to `d_residual`."""


class LinearsFactory(Protocol[Weights]):
    """Makes the linears of a layer from its weights.

    Given `inputs`, the forward pass saves inputs of GEMMs there and the backward pass takes them; else they are
    recomputed.
    """

    def __call__(self, model: Model, weights: Weights, inputs: SavedInputs | None = None, /) -> LayerLinears:
        """Return the linears for one chunk."""


class PlainLinears:
    """Linears in the dtype of the residual."""

    def __init__(self, model: Model, weights: LayerWeights, inputs: SavedInputs | None = None):
        self.model, self.weights, self.inputs, self.gemms = model, weights, inputs, LinearGemms()
        self.widths = (model.heads * model.head_dim, *(2 * [model.kv_heads * model.head_dim]))

    def qkv_proj(self, input_NC: Tensor, outs: Sequence[Tensor]) -> None:
        """Run three GEMMs into separate buffers, instead of one and three copies."""
        x_NC = self._save("x1", rms_norm(input_NC, self.weights.norm1_C, self.model.norm_eps))
        for weight, out in zip(self.weights.wqkv_XC.split(self.widths), outs, strict=False):
            self.gemms.forward(x_NC, weight, out)

    def o_proj(self, attn_NA: Tensor, input_NC: Tensor, out_NC: Tensor) -> None:
        self.gemms.forward(attn_NA, self.weights.wo_CA, out_NC, addend=input_NC)

    def gate_up_proj(self, residual_NC: Tensor, out_N2F: Tensor) -> None:
        x_NC = self._save("x2", rms_norm(residual_NC, self.weights.norm2_C, self.model.norm_eps))
        self.gemms.forward(x_NC, self.weights.w13_2FC, out_N2F)

    def down_proj(self, gate_up_N2F: Tensor, residual_NC: Tensor, out_NC: Tensor, save: bool) -> None:
        act_NF = self._save("act", swiglu(gate_up_N2F, out=None if save else gate_up_N2F[:, : self.model.ffn]))
        self.gemms.forward(act_NF, self.weights.w2_CF, out_NC, addend=residual_NC)

    def mlp_backward(
        self, grads: LayerWeights, accumulate: bool, saved: SavedActivations, d_residual_NC: Tensor, out_NC: Tensor
    ) -> None:
        act_NF, x_NC = self._pop("act"), self._pop("x2")
        dact_NF = self.gemms.input_gradient(d_residual_NC, self.weights.w2_CF)
        swiglu_backward(dact_NF, saved.gate_up_N2F, recompute=act_NF is None)
        self.gemms.weight_gradient(d_residual_NC, dact_NF if act_NF is None else act_NF, grads.w2_CF, accumulate)
        del dact_NF, act_NF
        if x_NC is None:
            x_NC = rms_norm(saved.residual_NC, self.weights.norm2_C, self.model.norm_eps)
        self.gemms.weight_gradient(saved.gate_up_N2F, x_NC, grads.w13_2FC, accumulate)
        # The normed residual is no longer needed.
        dx_NC = self.gemms.input_gradient(saved.gate_up_N2F, self.weights.w13_2FC, out=x_NC)
        rms_norm_backward(dx_NC, saved.residual_NC, self.weights.norm2_C, self.model.norm_eps, d_residual_NC, out_NC,
                          grads.norm2_C, accumulate)  # fmt: skip

    def o_proj_backward(
        self, grads: LayerWeights, accumulate: bool, attn_NA: Tensor, d_residual_NC: Tensor, out_NA: Tensor
    ) -> None:
        self.gemms.weight_gradient(d_residual_NC, attn_NA, grads.wo_CA, accumulate)
        self.gemms.input_gradient(d_residual_NC, self.weights.wo_CA, out=out_NA)

    def qkv_proj_backward(
        self,
        grads: LayerWeights,
        accumulate: bool,
        dqkv_NX: Tensor,
        input_NC: Tensor,
        d_residual_NC: Tensor,
        workspace_NC: Tensor,
    ) -> None:
        x_NC = self._pop("x1")
        if x_NC is None:
            x_NC = rms_norm(input_NC, self.weights.norm1_C, self.model.norm_eps, out=workspace_NC)
        self.gemms.weight_gradient(dqkv_NX, x_NC, grads.wqkv_XC, accumulate)
        self.gemms.input_gradient(dqkv_NX, self.weights.wqkv_XC, out=workspace_NC)
        rms_norm_backward(workspace_NC, input_NC, self.weights.norm1_C, self.model.norm_eps, d_residual_NC,
                          d_residual_NC, grads.norm1_C, accumulate)  # fmt: skip

    def _save(self, name: str, x: Tensor) -> Tensor:
        if self.inputs is not None:
            self.inputs[name] = x
        return x

    def _pop(self, name: str) -> Tensor | None:
        """Give up a saved input, so that it is freed after its last GEMM; None if inputs are not saved."""
        return None if self.inputs is None else self.inputs.pop(name)
