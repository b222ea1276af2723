"""The linear layers of a Llama layer with fp8 operands: whatever produces an operand writes it in fp8 at once.

    linears = Fp8Linears(model, layer)                      # a Fp8LayerWeights of `fp8_layer_weights.py`
    linears.qkv_proj(input_NC, (q_NA, k_NW, v_NW))          # as `linears.py`

One scale per tensor. Norm, activation and its backward write fp8 in the memory layout that the next GEMM takes; the
attention, its gradients and those of the residual come from elsewhere and are cast. Scales are those of earlier steps
(delayed scaling). The residual stays in bf16, and gradients in the dtype of their buffers. Tensor-parallel ranks share
scales, and gather fp8: half the bytes of bf16. Gathered columns are the rows transposed.

Shapes as in `layer_tensors.py`; P tokens padded with zeros to a multiple of 16.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.models.llama_layer.fp8_layer_weights import FORMATS, Fp8LayerWeights
from llmb.models.llama_layer.layer_collectives import TensorParallel
from llmb.models.llama_layer.layer_tensors import SavedInputs
from llmb.models.llama_layer.linear_gemms import Fp8LinearGemms
from llmb.models.llama_layer.quantized_linears import QuantizedLinears
from llmb.ops.activation.glu_fp8 import glu_backward_fp8, glu_fp8
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8
from llmb.ops.quant.fp8_quant import Fp8Tensor, ScaleAmax, padded_tokens, quantize_fp8

Quantize = Callable[..., None]  # writes a tensor in fp8, given its scale and amax and a buffer for each layout


class Fp8Linears(QuantizedLinears[Fp8Tensor]):
    """Linears with one scale per operand; see `linears.LayerLinears`."""

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

    def _activation(self, gate_up_N2F: Tensor) -> Fp8Tensor:
        quantize = partial(glu_fp8, gate_up_N2F, self.model.activation)
        return self._quantized("act", quantize, gate_up_N2F, self.model.ffn, rows=True, columns=False)

    def _norm(self, x_SC: Tensor, weight_C: Tensor) -> Quantize:
        return partial(rms_norm_fp8, x_SC, weight_C, self.model.norm_eps)

    def _cast(self, x_NK: Tensor) -> Quantize:
        return partial(quantize_fp8, x_NK)

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
