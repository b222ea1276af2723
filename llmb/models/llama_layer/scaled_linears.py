"""The linear layers of a Llama layer with fp8 operands that have many scales: recipes rowwise and blockwise.

    linears = ScaledLinears(model, layer)                   # a ScaledLayerWeights of `scaled_layer_weights.py`
    linears.qkv_proj(input_NC, (q_NA, k_NW, v_NW))          # as `linears.py`

Norm, activation and its backward write bf16, and a pass of its own quantizes it: a tensor's scales are those of its
values, along channels for `rows` and along tokens for `columns`, so neither layout follows from the other.

On several ranks scales are those of one process. Where only rows are needed, a tensor-parallel rank quantizes its
tokens and gathers fp8 with the scales; for columns, which are reduced over all tokens, it gathers bf16. What has the
channels of its rank alone (attention, activation and their gradients) takes the maximum of a token's amaxes over these
ranks, and columns take that of a channel's amaxes over the ranks of context parallelism: rowwise only, since a group of
128 is whole on one rank.

Shapes as in `layer_tensors.py`.
"""

from functools import partial

from torch import Tensor

from llmb.config.model import Model
from llmb.models.llama_layer.layer_collectives import TensorParallel
from llmb.models.llama_layer.layer_tensors import SavedInputs
from llmb.models.llama_layer.linear_gemms import ScaledLinearGemms
from llmb.models.llama_layer.quantized_linears import Produce, QuantizedLinears
from llmb.models.llama_layer.scaled_layer_weights import ScaledLayerWeights
from llmb.ops.activation.activation import glu, glu_backward
from llmb.ops.norm.rms_norm import rms_norm
from llmb.ops.quant.scaled_fp8 import ScaledFp8


class ScaledLinears(QuantizedLinears[ScaledFp8]):
    """Linears with many scales per operand; see `linears.LayerLinears`."""

    def __init__(
        self,
        model: Model,
        layer: ScaledLayerWeights,
        inputs: SavedInputs | None = None,
        tp: TensorParallel | None = None,
        fp8_fast_accum: bool = False,
    ):
        super().__init__(model, layer.weights, inputs, tp)
        self.layer, self.gemms = layer, ScaledLinearGemms(fp8_fast_accum)

    def _norm(self, x_SC: Tensor, weight_C: Tensor) -> Produce:
        return partial(rms_norm, x_SC, weight_C, self.model.norm_eps)

    def _cast(self, x_NK: Tensor) -> Produce:
        return lambda: x_NK

    def _activation(self, gate_up_N2F: Tensor) -> ScaledFp8:
        return self.layer.quantized("act", glu(gate_up_N2F, self.model.activation), rows=True)

    def _activation_backward(self, dout: ScaledFp8, gate_up_N2F: Tensor) -> tuple[ScaledFp8, ScaledFp8]:
        n, f = len(gate_up_N2F), self.model.ffn
        act_NF = self.gemms.input_gradient(dout, self.layer.columns("w2"), gate_up_N2F.new_empty(n, f))
        glu_backward(act_NF, gate_up_N2F, self.model.activation)  # its gradient becomes the activation
        act = self.layer.quantized("act", act_NF, columns=True)
        del act_NF
        return self.layer.quantized("dh13", gate_up_N2F, rows=True, columns=True), act

    def _gathered(
        self, name: str, produce: Produce, like: Tensor, tp: TensorParallel | None, rows: bool, columns: bool
    ) -> ScaledFp8:
        x_SK = produce()
        if tp is None or columns:
            x_NK = x_SK if tp is None else tp.gather(x_SK)
            return self.layer.quantized(name, x_NK, rows=rows, columns=columns)
        shard = self.layer.quantized(name, x_SK, rows=True)
        # Scales with tokens contiguous, as they were.
        scales = tp.gather(shard.row_scales).T.contiguous().T
        return shard._replace(rows=tp.gather(shard.rows), row_scales=scales)
