"""A layer's weight matrices in fp8 with many scales each, and how its other operands are quantized.

    layer = ScaledLayerWeights(3, weights, scales)          # scales: a VectorScaling
    layer.rows("w2"), layer.columns("w2")
    layer.quantized("attn", attn_NA, rows=True)

When matrices are quantized, and where they lie: as in `fp8_layer_weights.py`. On tensor-parallel ranks `scales` has the
reductions of amaxes over ranks that share a row of an operand.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from llmb.models.llama_layer.fp8_layer_weights import MATRICES, QuantizedLayerWeights
from llmb.models.llama_layer.layer_tensors import LayerWeights
from llmb.ops.quant.scaled_fp8 import ScaledFp8
from llmb.ops.quant.vector_scaling import VectorScaling

SHARDED_INPUTS = ("wo", "w2")  # matrices whose rows are divided among tensor-parallel ranks; of others columns are
SHARDED_CHANNELS = ("attn", "act", "dqkv", "dh13")  # other operands with the channels of a tensor-parallel rank


class ScaledLayerWeights(QuantizedLayerWeights[ScaledFp8]):
    """Weights of a layer as `scaled_linears.py` takes them."""

    def __init__(
        self, _layer: int, weights: LayerWeights, scales: VectorScaling, buffers: dict[str, ScaledFp8] | None = None
    ):
        super().__init__(weights)
        self.scales, self._buffers = scales, buffers

    @staticmethod
    def empty_buffers(
        shapes: Iterable[Sequence[int]], device: torch.device, scales: VectorScaling
    ) -> dict[str, ScaledFp8]:
        """Allocate all matrices of a layer in both layouts, given their shapes."""
        named = zip(MATRICES, shapes, strict=False)
        return {
            name: scales.empty(rows, columns, device, rows=True, columns=True, weight=True)
            for name, (rows, columns) in named
        }

    def quantized(self, name: str, x_NK: Tensor, *, rows: bool = False, columns: bool = False) -> ScaledFp8:
        """Return an activation or gradient in the requested layouts."""
        (n, k), reductions = x_NK.shape, self.scales.reductions
        out = self.scales.empty(n, k, x_NK.device, rows=rows, columns=columns)
        shared_rows = reductions.channels if name in SHARDED_CHANNELS else None
        self.scales.quantize_(x_NK, out, (shared_rows, reductions.tokens))
        return out

    def _cast(self, name: str, rows: bool, columns: bool) -> ScaledFp8:
        weight, shared = self.weights.matrices[MATRICES.index(name)], self.scales.reductions.channels
        reductions, (n, k) = (shared, None) if name in SHARDED_INPUTS else (None, shared), weight.shape
        if self._buffers is None:
            out = self.scales.empty(n, k, weight.device, rows=rows, columns=columns, weight=True)
        else:
            out = self._buffers[name].with_layouts(rows, columns)
        self.scales.quantize_(weight, out, reductions, weight=True)
        return out
