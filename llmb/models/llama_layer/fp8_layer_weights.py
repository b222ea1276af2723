"""A layer's weight matrices in fp8, and the delayed scales of all operands of its GEMMs.

    fp8_weights = Fp8ModelWeights(model, device)
    layer = fp8_weights.layer(3, "forward", weights)    # weights: a LayerWeights, in bf16
    layer.rows("w2"), layer.columns("w2")
    fp8_weights.scales.update()                           # once a step

There is memory for one layer, since layers are computed one after another, all chunks of a round in each. A matrix is
cast when a layout of it is first requested, and again when another layer, or the other pass, begins: the optimizer may
run in between.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from llmb.config.llama_layer_shapes import check_fp8_widths, layer_weight_shapes
from llmb.config.spec import Model
from llmb.models.llama_layer.layer_tensors import LayerWeights
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import DelayedScaling
from llmb.ops.quant.fp8_quant import E5M2, Fp8Tensor, ScaleAmax, quantize_fp8

PassName = Literal["forward", "backward"]
LayerScales = DelayedScaling[tuple[int, str]]  # by layer and name
MATRICES = ("wqkv", "wo", "w13", "w2")
ACTIVATIONS = ("x1", "attn", "x2", "act")  # inputs of these
GRADIENTS = ("dqkv", "dresid", "dh13", "dout")  # of their outputs
FORMATS = {**dict.fromkeys((*MATRICES, *ACTIVATIONS), E4M3), **dict.fromkeys(GRADIENTS, E5M2)}


class Fp8LayerWeights:
    """Weights of a layer as `fp8_linears.py` takes them."""

    def __init__(
        self, layer: int, weights: LayerWeights, scales: LayerScales, rows: list[Tensor], columns: list[Tensor]
    ):
        self.weights = weights  # in their current place: between two chunks they may move
        self._layer, self.scales = layer, scales
        self._rows, self._columns = (dict(zip(MATRICES, buffers, strict=True)) for buffers in (rows, columns))
        self._quantized: dict[tuple[str, str], Fp8Tensor] = {}

    @property
    def norm1_C(self) -> Tensor:
        return self.weights.norm1_C

    @property
    def norm2_C(self) -> Tensor:
        return self.weights.norm2_C

    def scale_amax_of(self, *names: str, measure: Callable[..., None]) -> tuple[ScaleAmax, ...]:
        """Return scales and amaxes of this layer; see `DelayedScaling.scale_amax_of`."""
        return self.scales.scale_amax_of(*((self._layer, name) for name in names), measure=measure)

    def rows(self, name: str) -> Fp8Tensor:
        """Return a matrix in the layout of forward GEMMs."""
        return self._layout(name, "rows")

    def columns(self, name: str) -> Fp8Tensor:
        """Return a matrix in the layout of input gradients."""
        return self._layout(name, "columns")

    def quantize(self) -> None:
        """Cast all matrices in both layouts; for those who have memory for every layer."""
        for name, weight in zip(MATRICES, self.weights, strict=False):
            (scale_amax,) = self.scale_amax_of(name, measure=partial(quantize_fp8, weight))
            rows, columns = self._rows[name], self._columns[name]
            quantize_fp8(weight, scale_amax, rows, columns)
            matrix = Fp8Tensor(rows, columns, scale_amax.scale)
            self._quantized[name, "rows"] = self._quantized[name, "columns"] = matrix

    def _layout(self, name: str, layout: str) -> Fp8Tensor:
        if (name, layout) not in self._quantized:
            weight = self.weights[MATRICES.index(name)]
            (scale_amax,) = self.scale_amax_of(name, measure=lambda scale_amax: quantize_fp8(weight, scale_amax))
            empty = self._rows[name].new_empty(0)
            if layout == "rows":
                matrix = Fp8Tensor(self._rows[name], empty, scale_amax.scale)
                quantize_fp8(weight, scale_amax, matrix.rows)
            else:
                matrix = Fp8Tensor(empty, self._columns[name], scale_amax.scale)
                quantize_fp8(weight, scale_amax, None, matrix.columns)
            self._quantized[name, layout] = matrix
        return self._quantized[name, layout]


class Fp8ModelWeights:
    """fp8 weights of a model, one layer at a time."""

    def __init__(self, model: Model, device: torch.device):
        check_fp8_widths(model)
        names = {(layer, name): dtype for layer in range(model.layers) for name, dtype in FORMATS.items()}
        self.scales = DelayedScaling(names, device)
        shapes = layer_weight_shapes(model)[: len(MATRICES)]
        self._rows = [torch.empty(shape, dtype=E4M3, device=device) for shape in shapes]
        self._columns = [torch.empty(shape[::-1], dtype=E4M3, device=device) for shape in shapes]
        self._current: tuple[int, PassName] | None = None
        self._layer: Fp8LayerWeights | None = None

    def layer(self, layer: int, pass_name: PassName, weights: LayerWeights) -> Fp8LayerWeights:
        """Return the weights of a layer for the forward or backward pass."""
        if self._layer is None or self._current != (layer, pass_name):
            self._layer = Fp8LayerWeights(layer, weights, self.scales, self._rows, self._columns)
            self._current = (layer, pass_name)
        self._layer.weights = weights
        return self._layer
