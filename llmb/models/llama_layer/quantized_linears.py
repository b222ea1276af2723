"""Linear layers of a Llama layer with fp8 operands, whatever their scales.

    class Fp8Linears(QuantizedLinears[Fp8Tensor]): ...          # one scale per tensor: `fp8_linears.py`
    class ScaledLinears(QuantizedLinears[ScaledFp8]): ...       # per row or per 128 values: `scaled_linears.py`

A recipe says how a tensor is produced (`_norm`, `_cast`, `_activation`, `_activation_backward`) and quantized
(`_gathered`), in the memory layouts that GEMMs take: `rows` are reduced over channels, `columns` over tokens. Saved
inputs are written in both layouts at once, except for the activation, of which that would save nothing.

Shapes as in `layer_tensors.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from llmb.models.llama_layer.layer_collectives import TensorParallel
from llmb.models.llama_layer.layer_tensors import LayerWeights, SavedActivations
from llmb.models.llama_layer.linears import ResidualLinears
from llmb.ops.quant.fp8_quant import Fp8Tensor
from llmb.ops.quant.scaled_fp8 import ScaledFp8

Matrix = TypeVar("Matrix", Fp8Tensor, ScaledFp8)
Produce = Callable[..., Any]  # what `_gathered` of the recipe calls to get a tensor


class QuantizedLinears(ResidualLinears, ABC, Generic[Matrix]):
    """Linears with fp8 operands; see `linears.LayerLinears`."""

    layer: Any  # a QuantizedLayerWeights of the same matrices

    @abstractmethod
    def _norm(self, x_SC: Tensor, weight_C: Tensor) -> Produce:
        """Return how the normed residual is produced."""

    @abstractmethod
    def _cast(self, x_NK: Tensor) -> Produce:
        """Return how a tensor that exists is produced."""

    @abstractmethod
    def _activation(self, gate_up_N2F: Tensor) -> Matrix:
        """Return the input of the down projection."""

    @abstractmethod
    def _activation_backward(self, dout: Matrix, gate_up_N2F: Tensor) -> tuple[Matrix, Matrix]:
        """Return the gradient of gate and up, and the activation, which the gradient of the down projection takes."""

    @abstractmethod
    def _gathered(
        self, name: str, produce: Produce, like: Tensor, tp: TensorParallel | None, rows: bool, columns: bool
    ) -> Matrix:
        """Return a tensor, all tokens of it, in the requested layouts; `tp` gathers it, None if it is whole."""

    def qkv_proj(self, input_SC: Tensor, outs: Sequence[Tensor]) -> None:
        x = self._forward_input("x1", self._norm(input_SC, self.layer.norm1_C), input_SC, self.tp)
        weight = self.layer.rows("wqkv")
        self._project_qkv(x, weight, weight.split_rows, outs)

    def o_proj(self, attn_NA: Tensor, input_SC: Tensor, out_SC: Tensor, saved: SavedActivations | None) -> None:
        attn = self._forward_input("attn", self._cast(attn_NA), attn_NA)
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
        attn = self._backward_input("attn", self._cast(attn_NA), attn_NA)
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

    def _forward_input(self, name: str, produce: Produce, like: Tensor, tp: TensorParallel | None = None) -> Matrix:
        """Return the input of a forward GEMM; the layout for its weight gradient is saved if inputs are."""
        x = self._gathered(name, produce, like, tp, rows=True, columns=self.inputs is not None)
        if self.inputs is not None:
            self.inputs[name] = x._replace(rows=x.rows.new_empty(0))
        return x

    def _backward_input(self, name: str, produce: Produce, like: Tensor, tp: TensorParallel | None = None) -> Matrix:
        """Return the input of a weight gradient. A saved one is given up, so that it is freed after its GEMM."""
        if self.inputs is not None:
            return self.inputs.pop(name)
        return self._gathered(name, produce, like, tp, rows=False, columns=True)

    def _gradient(self, name: str, x_NK: Tensor, tp: TensorParallel | None = None) -> Matrix:
        return self._gathered(name, self._cast(x_NK), x_NK, tp, rows=True, columns=True)
