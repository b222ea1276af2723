"""The linear layers of a Llama layer with fp8 operands: whatever produces an operand writes it in fp8 at once.

    linears = Fp8Linears(model, layer)                      # a Fp8LayerWeights of `fp8_layer_weights.py`
    linears.qkv_proj(input_NC, (q_NA, k_NW, v_NW))          # as `linears.py`

Norm, activation and its backward write fp8 in the memory layout that the next GEMM takes; the attention, its gradients
and those of the residual come from elsewhere and are cast. Saved inputs are written in both layouts at once, except for
the activation, of which that would save nothing. Scales are those of earlier steps (delayed scaling). The residual
stays in bf16, and gradients in the dtype of their buffers. Tensor-parallel ranks share scales, and gather fp8: half
the bytes of bf16. Gathered columns are the rows transposed.

Shapes as in `layer_tensors.py`; P tokens padded with zeros to a multiple of 16.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.models.llama_layer.fp8_layer_weights import FORMATS, Fp8LayerWeights
from llmb.models.llama_layer.layer_collectives import TensorParallel
from llmb.models.llama_layer.layer_tensors import LayerWeights, SavedActivations, SavedInputs
from llmb.models.llama_layer.linear_gemms import Fp8LinearGemms
from llmb.models.llama_layer.linears import ResidualLinears
from llmb.ops.activation.glu_fp8 import glu_backward_fp8, glu_fp8
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8
from llmb.ops.quant.fp8_quant import Fp8Tensor, ScaleAmax, padded_tokens, quantize_fp8

Quantize = Callable[..., None]  # writes a tensor in fp8, given its scale and amax and a buffer for each layout


class Fp8Linears(ResidualLinears):
    """Linears with fp8 operands; see `linears.LayerLinears`."""

    def __init__(
        self,
        model: Model,
        layer: Fp8LayerWeights,
        inputs: SavedInputs | None = None,
        tp: TensorParallel | None = None,
        fp8_fast_accum: bool = False,
    ):
        super().__init__(model, layer.weights, inputs, tp)
        self.layer, self.gemms = layer, Fp8LinearGemms(fp8_fast_accum)

    def qkv_proj(self, input_SC: Tensor, outs: Sequence[Tensor]) -> None:
        x = self._forward_input("x1", self._norm(input_SC, self.layer.norm1_C), input_SC, self.tp)
        weight = self.layer.rows("wqkv")
        for rows, out in zip(weight.rows.split(self.widths), outs, strict=False):
            self.gemms.forward(x, weight._replace(rows=rows), out)

    def o_proj(self, attn_NA: Tensor, input_SC: Tensor, out_SC: Tensor, saved: SavedActivations | None) -> None:
        attn = self._forward_input("attn", partial(quantize_fp8, attn_NA), attn_NA)
        self._add_output("attn", attn, self.layer.rows("wo"), len(attn_NA), input_SC, out_SC, saved)

    def gate_up_proj(self, residual_SC: Tensor, out_N2F: Tensor) -> None:
        x = self._forward_input("x2", self._norm(residual_SC, self.layer.norm2_C), residual_SC, self.tp)
        self.gemms.forward(x, self.layer.rows("w13"), out_N2F)

    def down_proj(
        self, gate_up_N2F: Tensor, residual_SC: Tensor, out_SC: Tensor, saved: SavedActivations | None
    ) -> None:
        """Leaves gate and up as they are in any case."""
        act = self._activation(gate_up_N2F)
        self._add_output("mlp", act, self.layer.rows("w2"), len(gate_up_N2F), residual_SC, out_SC, saved)

    def recompute_mlp(self, saved: SavedActivations) -> None:
        act = self._activation(saved.gate_up_N2F)
        self._project(act, self.layer.rows("w2"), len(saved.gate_up_N2F), saved.residual_SC, saved.mlp_SC)

    def _activation(self, gate_up_N2F: Tensor) -> Fp8Tensor:
        quantize = partial(glu_fp8, gate_up_N2F, self.model.activation)
        return self._quantized("act", quantize, gate_up_N2F, self.model.ffn, rows=True, columns=False)

    def mlp_backward(
        self, grads: LayerWeights, accumulate: bool, saved: SavedActivations, d_residual_SC: Tensor, out_SC: Tensor
    ) -> None:
        dout_SC = self._post_norm_backward("mlp", grads, accumulate, saved, d_residual_SC)
        dout = self._gradient("dout", dout_SC, self.tp)
        dgate_up, act = self._activation_backward(dout, saved.gate_up_N2F)
        self.gemms.weight_gradient(dout, act, grads.w2_CF, accumulate)
        del dout, act
        x = self._backward_input("x2", self._norm(saved.residual_SC, self.layer.norm2_C), saved.residual_SC, self.tp)
        self.gemms.weight_gradient(dgate_up, x, grads.w13_2FC, accumulate)
        del x
        dx_NC = d_residual_SC.new_empty(len(saved.gate_up_N2F), self.model.hidden)
        self.gemms.input_gradient(dgate_up, self.layer.columns("w13"), dx_NC)
        self._norm_backward(dx_NC, saved.residual_SC, self.layer.norm2_C, d_residual_SC, out_SC, grads.norm2_C,
                            accumulate)  # fmt: skip

    def o_proj_backward(
        self, grads: LayerWeights, accumulate: bool, attn_NA: Tensor, saved: SavedActivations, d_residual_SC: Tensor,
        out_NA: Tensor,
    ) -> None:  # fmt: skip
        dout_SC = self._post_norm_backward("attn", grads, accumulate, saved, d_residual_SC)
        d_residual = self._gradient("dresid", dout_SC, self.tp)
        self.gemms.input_gradient(d_residual, self.layer.columns("wo"), out_NA)
        attn = self._backward_input("attn", partial(quantize_fp8, attn_NA), attn_NA)
        self.gemms.weight_gradient(d_residual, attn, grads.wo_CA, accumulate)

    def qkv_proj_backward(
        self,
        grads: LayerWeights,
        accumulate: bool,
        dqkv_NX: Tensor,
        input_SC: Tensor,
        d_residual_SC: Tensor,
        workspace_NC: Tensor,
    ) -> None:
        dqkv = self._gradient("dqkv", dqkv_NX)
        x = self._backward_input("x1", self._norm(input_SC, self.layer.norm1_C), input_SC, self.tp)
        self.gemms.weight_gradient(dqkv, x, grads.wqkv_XC, accumulate)
        self.gemms.input_gradient(dqkv, self.layer.columns("wqkv"), workspace_NC)
        self._norm_backward(workspace_NC, input_SC, self.layer.norm1_C, d_residual_SC, d_residual_SC, grads.norm1_C,
                            accumulate)  # fmt: skip

    def _norm(self, x_SC: Tensor, weight_C: Tensor) -> Quantize:
        return partial(rms_norm_fp8, x_SC, weight_C, self.model.norm_eps)

    def _forward_input(
        self, name: str, quantize: Quantize, like: Tensor, tp: TensorParallel | None = None
    ) -> Fp8Tensor:
        """Return the input of a forward GEMM; the layout for its weight gradient is saved if inputs are."""
        x = self._gathered(name, quantize, like, tp, rows=True, columns=self.inputs is not None)
        if self.inputs is not None:
            self.inputs[name] = x._replace(rows=x.rows.new_empty(0))
        return x

    def _backward_input(
        self, name: str, quantize: Quantize, like: Tensor, tp: TensorParallel | None = None
    ) -> Fp8Tensor:
        """Return the input of a weight gradient. A saved one is given up, so that it is freed after its GEMM."""
        if self.inputs is not None:
            return self.inputs.pop(name)
        return self._gathered(name, quantize, like, tp, rows=False, columns=True)

    def _gradient(self, name: str, x_NK: Tensor, tp: TensorParallel | None = None) -> Fp8Tensor:
        return self._gathered(name, partial(quantize_fp8, x_NK), x_NK, tp, rows=True, columns=True)

    def _activation_backward(self, dout: Fp8Tensor, gate_up_N2F: Tensor) -> tuple[Fp8Tensor, Fp8Tensor]:
        """Return the gradient of gate and up, and the activation, which the gradient of the down projection takes."""
        n, f = len(gate_up_N2F), self.model.ffn
        dact_NF = self.gemms.input_gradient(dout, self.layer.columns("w2"), gate_up_N2F.new_empty(n, f))
        quantize = partial(glu_backward_fp8, dact_NF, gate_up_N2F, self.model.activation)
        grad_scale, act_scale = self.layer.scale_amax_of(
            "dh13", "act", measure=lambda grad, act: quantize(grad, None, None, act, None)
        )
        grad_rows, grad_columns = _empty_layouts("dh13", gate_up_N2F, 2 * f, True, True)
        act_rows, act_columns = _empty_layouts("act", gate_up_N2F, f, False, True)
        quantize(grad_scale, grad_rows, grad_columns, act_scale, act_columns)
        return (
            Fp8Tensor(grad_rows, grad_columns, grad_scale.scale),
            Fp8Tensor(act_rows, act_columns, act_scale.scale),
        )

    def _gathered(
        self, name: str, quantize: Quantize, like: Tensor, tp: TensorParallel | None, rows: bool, columns: bool
    ) -> Fp8Tensor:
        """Return a tensor, all tokens of it, in the requested layouts; `tp` gathers it, None if it is whole."""
        if tp is None:
            return self._quantized(name, quantize, like, like.shape[1], rows, columns)
        shard = self._quantized(name, quantize, like, like.shape[1], rows=True, columns=False)
        rows_NK = tp.gather(shard.rows)
        _, columns_KP = _empty_layouts(name, rows_NK, like.shape[1], False, columns)
        if columns:
            unit = torch.ones((), device=rows_NK.device)
            quantize_fp8(rows_NK, ScaleAmax(unit, None), None, columns_KP)  # transposes the same bits
        return Fp8Tensor(rows_NK if rows else rows_NK.new_empty(0), columns_KP, shard.scale)

    def _quantized(self, name: str, quantize: Quantize, like: Tensor, k: int, rows: bool, columns: bool) -> Fp8Tensor:
        """Return a tensor of so many channels in the requested layouts."""
        (scale_amax,) = self.layer.scale_amax_of(name, measure=quantize)
        rows_NK, columns_KP = _empty_layouts(name, like, k, rows, columns)
        quantize(scale_amax, rows_NK if rows else None, columns_KP if columns else None)
        return Fp8Tensor(rows_NK, columns_KP, scale_amax.scale)


def _empty_layouts(name: str, like: Tensor, k: int, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Allocate both layouts of a tensor; one that is not requested is empty."""
    n, dtype = len(like), FORMATS[name]
    return (
        torch.empty((n, k) if rows else 0, dtype=dtype, device=like.device),
        torch.empty((k, padded_tokens(n)) if columns else 0, dtype=dtype, device=like.device),
    )
