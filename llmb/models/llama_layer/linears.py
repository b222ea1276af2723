"""The linear layers of a Llama layer, each with the norm or activation before it, forward and backward.

    linears = PlainLinears(model, weights)                                          # of one layer
    linears.qkv_proj(input_NC, (q_NA, k_NW, v_NW))                                  # norm, then queries, keys, values
    linears.o_proj(attn_NA, input_NC, residual_NC, saved)                           # added to the residual
    linears.gate_up_proj(residual_NC, gate_up_N2F)                                  # norm, then gate and up
    linears.down_proj(gate_up_N2F, residual_NC, out_NC, saved)                      # activation, then added to it

The backward methods run in reverse order. The attention in between belongs to `layer.py`. Another precision is another
class with the same methods (`fp8_linears.py`): what produces the input of a GEMM must know its format. Adapters of
frozen weights only change the GEMMs (`lora_linears.py`); gradients of frozen vectors are None.

With tensor parallelism `model` has the sizes of this rank's shard, the residual has its S tokens, and the collectives
are those of `TensorParallel`: normed inputs and output gradients are gathered, partial outputs and input gradients
reduced. Gradients of norms are those of the rank's tokens. On one rank S is N, and GEMMs add to the residual by
themselves, unless their output has a norm of its own (post-norms): then that is what adds.

Shapes as in `layer_tensors.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.models.llama_layer.layer_collectives import TensorParallel
from llmb.models.llama_layer.layer_tensors import Block, LayerWeights, SavedActivations, SavedInputs
from llmb.models.llama_layer.linear_gemms import LinearGemms
from llmb.ops.activation.activation import glu, glu_backward
from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward
from llmb.ops.tensor_layout import merge_columns

Weights = TypeVar("Weights", contravariant=True)


class LayerLinears(Protocol):
    """Linear layers of one layer over one chunk. Gradients are set, or added to with `accumulate`."""

    @property
    def vectors(self) -> LayerWeights:
        """The layer's weights as they are, of which biases and norms are used outside of linear layers."""

    def qkv_proj(self, input_SC: Tensor, outs: Sequence[Tensor]) -> None:
        """Project the normed residual to as many of queries, keys and values as there are outs."""

    def o_proj(self, attn_NA: Tensor, input_SC: Tensor, out_SC: Tensor, saved: SavedActivations | None) -> None:
        """Add the projected attention to the residual; what a post-norm takes is saved."""

    def gate_up_proj(self, residual_SC: Tensor, out_N2F: Tensor) -> None:
        """Project the normed residual to gate and up."""

    def down_proj(
        self, gate_up_N2F: Tensor, residual_SC: Tensor, out_SC: Tensor, saved: SavedActivations | None
    ) -> None:
        """Add the MLP's output to the residual; `out` may be `residual`. Unless saved, gate and up are overwritten."""

    def recompute_mlp(self, saved: SavedActivations) -> None:
        """Fill again what the post-norm of the MLP takes, from gate and up."""

    def mlp_backward(
        self, grads: LayerWeights, accumulate: bool, saved: SavedActivations, d_residual_SC: Tensor, out_SC: Tensor
    ) -> None:
        """Set `out`, which may be `d_residual`, to the gradient of `saved.residual`. Gate and up are overwritten."""

    def o_proj_backward(
        self, grads: LayerWeights, accumulate: bool, attn_NA: Tensor, saved: SavedActivations, d_residual_SC: Tensor,
        out_NA: Tensor,
    ) -> None:  # fmt: skip
        """Set `out` to the gradient of the attention output."""

    def qkv_proj_backward(
        self,
        grads: LayerWeights,
        accumulate: bool,
        dqkv_NX: Tensor,
        input_SC: Tensor,
        d_residual_SC: Tensor,
        workspace_NC: Tensor,
    ) -> None:
        """Add the gradient of `input` to `d_residual`."""


class LinearsFactory(Protocol[Weights]):
    """Makes the linears of a layer from its weights.

    Given `inputs`, the forward pass saves inputs of GEMMs there and the backward pass takes them; else they are
    recomputed.
    """

    def __call__(
        self, model: Model, weights: Weights, inputs: SavedInputs | None = None, tp: TensorParallel | None = None, /
    ) -> LayerLinears:
        """Return the linears for one chunk."""


class ResidualLinears:
    """Steps of any precision between the residual of a rank's tokens and GEMMs over all tokens."""

    gemms: Any

    def __init__(self, model: Model, vectors: LayerWeights, inputs: SavedInputs | None, tp: TensorParallel | None):
        self.model, self.vectors, self.inputs, self.tp = model, vectors, inputs, tp
        self.widths = (model.heads * model.head_dim, *(2 * [model.kv_heads * model.head_dim]))

    def _project_qkv(self, x: Any, weight: Any, split: Callable[..., Sequence[Any]], outs: Sequence[Tensor]) -> None:
        """Run one GEMM into outs that are side by side, else one into each, instead of one and three copies."""
        outs = merge_columns(outs)
        is_whole = outs[0].shape[1] == sum(self.widths)
        for projection, out in zip((weight,) if is_whole else split(self.widths), outs, strict=False):
            self.gemms.forward(x, projection, out)

    def _add_output(
        self, block: Block, x: Any, weight: Any, tokens: int, residual_SC: Tensor, out_SC: Tensor,
        saved: SavedActivations | None,
    ) -> None:  # fmt: skip
        """Set `out` to residual + x @ weight.T, where x has so many tokens; what a post-norm takes is saved."""
        norm_C = self.vectors.post_norm(block)
        if norm_C is not None:
            block_SC = self._project(x, weight, tokens, residual_SC, None if saved is None else saved.output(block))
            rms_norm(block_SC, norm_C, self.model.norm_eps, out=out_SC, addend_NC=residual_SC)
        elif self.tp is None:
            self.gemms.forward(x, weight, out_SC, addend=residual_SC)
        else:
            torch.add(residual_SC, self._project(x, weight, tokens, residual_SC), out=out_SC)

    def _project(self, x: Any, weight: Any, tokens: int, like_SC: Tensor, out_SC: Tensor | None = None) -> Tensor:
        """Return x @ weight.T of the tokens of the residual, where x has so many tokens: in `out`, if it is given."""
        if self.tp is None:
            return self.gemms.forward(x, weight, torch.empty_like(like_SC) if out_SC is None else out_SC)
        partial_NC = self.gemms.forward(x, weight, like_SC.new_empty(tokens, like_SC.shape[1]))
        reduced_SC = self.tp.reduce_scatter(partial_NC)
        return reduced_SC if out_SC is None else out_SC.copy_(reduced_SC)

    def _post_norm_backward(
        self, block: Block, grads: LayerWeights, accumulate: bool, saved: SavedActivations, d_residual_SC: Tensor
    ) -> Tensor:
        """Return the gradient of what a block adds to the residual: with a post-norm in the memory of its input."""
        norm_C, dnorm_C, saved_SC = self.vectors.post_norm(block), grads.post_norm(block), saved.output(block)
        if norm_C is None:
            return d_residual_SC
        assert saved_SC is not None
        rms_norm_backward(d_residual_SC, saved_SC, norm_C, self.model.norm_eps, None, saved_SC, dnorm_C, accumulate)
        return saved_SC

    def _norm_backward(
        self, partial_NC: Tensor, x_SC: Tensor, weight_C: Tensor, d_residual_SC: Tensor, out_SC: Tensor,
        dweight_C: Tensor | None, accumulate: bool,
    ) -> None:  # fmt: skip
        """Set `out` to d_residual plus the gradient of x, given this rank's part of that of the normed x."""
        dx_SC = partial_NC if self.tp is None else self.tp.reduce_scatter(partial_NC)
        rms_norm_backward(dx_SC, x_SC, weight_C, self.model.norm_eps, d_residual_SC, out_SC, dweight_C, accumulate)


class PlainLinears(ResidualLinears):
    """Linears in the dtype of the residual."""

    def __init__(
        self, model: Model, weights: LayerWeights, inputs: SavedInputs | None = None, tp: TensorParallel | None = None
    ):
        super().__init__(model, weights, inputs, tp)
        self.weights, self.gemms = weights, LinearGemms()

    def qkv_proj(self, input_SC: Tensor, outs: Sequence[Tensor]) -> None:
        x_NC = self._save("x1", self._gathered_norm(input_SC, self.weights.norm1_C))
        self._project_qkv(x_NC, self.weights.wqkv_XC, self.weights.wqkv_XC.split, outs)

    def o_proj(self, attn_NA: Tensor, input_SC: Tensor, out_SC: Tensor, saved: SavedActivations | None) -> None:
        self._add_output("attn", attn_NA, self.weights.wo_CA, len(attn_NA), input_SC, out_SC, saved)

    def gate_up_proj(self, residual_SC: Tensor, out_N2F: Tensor) -> None:
        x_NC = self._save("x2", self._gathered_norm(residual_SC, self.weights.norm2_C))
        self.gemms.forward(x_NC, self.weights.w13_2FC, out_N2F)

    def down_proj(
        self, gate_up_N2F: Tensor, residual_SC: Tensor, out_SC: Tensor, saved: SavedActivations | None
    ) -> None:
        in_place = gate_up_N2F[:, : self.model.ffn] if saved is None else None
        act_NF = self._save("act", glu(gate_up_N2F, self.model.activation, out=in_place))
        self._add_output("mlp", act_NF, self.weights.w2_CF, len(act_NF), residual_SC, out_SC, saved)

    def recompute_mlp(self, saved: SavedActivations) -> None:
        act_NF = glu(saved.gate_up_N2F, self.model.activation)
        self._project(act_NF, self.weights.w2_CF, len(act_NF), saved.residual_SC, saved.mlp_SC)

    def mlp_backward(
        self, grads: LayerWeights, accumulate: bool, saved: SavedActivations, d_residual_SC: Tensor, out_SC: Tensor
    ) -> None:
        act_NF, x_NC = self._pop("act"), self._pop("x2")
        dout_NC = self._gather(self._post_norm_backward("mlp", grads, accumulate, saved, d_residual_SC))
        dact_NF = self.gemms.input_gradient(dout_NC, self.weights.w2_CF)
        glu_backward(dact_NF, saved.gate_up_N2F, self.model.activation, recompute=act_NF is None)
        self.gemms.weight_gradient(dout_NC, dact_NF if act_NF is None else act_NF, grads.w2_CF, accumulate)
        del dact_NF, act_NF, dout_NC
        if x_NC is None:
            x_NC = self._gathered_norm(saved.residual_SC, self.weights.norm2_C)
        self.gemms.weight_gradient(saved.gate_up_N2F, x_NC, grads.w13_2FC, accumulate)
        # The normed residual is no longer needed.
        dx_NC = self.gemms.input_gradient(saved.gate_up_N2F, self.weights.w13_2FC, out=x_NC)
        self._norm_backward(dx_NC, saved.residual_SC, self.weights.norm2_C, d_residual_SC, out_SC, grads.norm2_C,
                            accumulate)  # fmt: skip

    def o_proj_backward(
        self, grads: LayerWeights, accumulate: bool, attn_NA: Tensor, saved: SavedActivations, d_residual_SC: Tensor,
        out_NA: Tensor,
    ) -> None:  # fmt: skip
        dout_NC = self._gather(self._post_norm_backward("attn", grads, accumulate, saved, d_residual_SC))
        self.gemms.weight_gradient(dout_NC, attn_NA, grads.wo_CA, accumulate)
        self.gemms.input_gradient(dout_NC, self.weights.wo_CA, out=out_NA)

    def qkv_proj_backward(
        self,
        grads: LayerWeights,
        accumulate: bool,
        dqkv_NX: Tensor,
        input_SC: Tensor,
        d_residual_SC: Tensor,
        workspace_NC: Tensor,
    ) -> None:
        x_NC = self._pop("x1")
        if x_NC is None:
            x_NC = self._gathered_norm(input_SC, self.weights.norm1_C, out=workspace_NC[: len(input_SC)])
        self.gemms.weight_gradient(dqkv_NX, x_NC, grads.wqkv_XC, accumulate)
        self.gemms.input_gradient(dqkv_NX, self.weights.wqkv_XC, out=workspace_NC)
        self._norm_backward(workspace_NC, input_SC, self.weights.norm1_C, d_residual_SC, d_residual_SC, grads.norm1_C,
                            accumulate)  # fmt: skip

    def _gathered_norm(self, x_SC: Tensor, weight_C: Tensor, out: Tensor | None = None) -> Tensor:
        return self._gather(rms_norm(x_SC, weight_C, self.model.norm_eps, out=out))

    def _gather(self, x_SC: Tensor) -> Tensor:
        return x_SC if self.tp is None else self.tp.gather(x_SC)

    def _save(self, name: str, x: Tensor) -> Tensor:
        if self.inputs is not None:
            self.inputs[name] = x
        return x

    def _pop(self, name: str) -> Tensor | None:
        """Give up a saved input, so that it is freed after its last GEMM; None if inputs are not saved."""
        return None if self.inputs is None else self.inputs.pop(name)
