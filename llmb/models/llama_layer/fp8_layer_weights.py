"""A layer's weight matrices in fp8, and the scales of all operands of its GEMMs.

    layer = Fp8LayerWeights(3, weights, scales)         # weights: a LayerWeights, in bf16
    layer.rows("w2"), layer.columns("w2")

A matrix is quantized when a layout of it is first requested, in memory that lives as long as this object: for a pass
over a layer whose weights are gathered for that pass. Where weights stay in memory, `quantize` casts all at once, in
buffers that stay too.

Out-of-core training has buffers for one layer (`layer_recipes.py`), since layers are computed one after another, all
chunks of a round in each. Matrices are quantized anew when another layer, or the other pass, begins: the optimizer may
run in between.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, Literal, NamedTuple

import torch
from torch import Tensor

from llmb.models.llama_layer.layer_tensors import LayerWeights
from llmb.models.llama_layer.quantized_linears import Matrix
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.delayed_scaling import Scaling
from llmb.ops.quant.fp8_quant import E5M2, Fp8Tensor, ScaleAmax, quantize_fp8

PassName = Literal["forward", "backward"]
MATRICES = ("wqkv", "wo", "w13", "w2")
ACTIVATIONS = ("x1", "attn", "x2", "act")  # inputs of these
GRADIENTS = ("dqkv", "dresid", "dh13", "dout")  # of their outputs
FORMATS = {**dict.fromkeys((*MATRICES, *ACTIVATIONS), E4M3), **dict.fromkeys(GRADIENTS, E5M2)}


def scale_name(layer: int, name: str) -> str:
    """Return the name of a tensor's scale, by the index of the layer in the whole model."""
    return f"layers.{layer}.{name}"


def scale_dtypes(layers: Iterable[int]) -> dict[str, torch.dtype]:
    """Return the fp8 dtypes of all operands of layers, as a scaling takes them."""
    return {scale_name(layer, name): dtype for layer in layers for name, dtype in FORMATS.items()}


class Fp8Buffers(NamedTuple):
    """Memory for all matrices of a layer in both layouts."""

    rows: dict[str, Tensor]
    columns: dict[str, Tensor]

    @classmethod
    def empty(cls, shapes: Iterable[Sequence[int]], device: torch.device) -> "Fp8Buffers":
        """Allocate them, given the shapes of the matrices."""
        named = dict(zip(MATRICES, shapes, strict=False))
        return cls(
            {name: torch.empty(*shape, dtype=E4M3, device=device) for name, shape in named.items()},
            {name: torch.empty(*shape[::-1], dtype=E4M3, device=device) for name, shape in named.items()},
        )


class QuantizedLayerWeights(ABC, Generic[Matrix]):
    """Weights of a layer as `quantized_linears.py` takes them."""

    def __init__(self, weights: LayerWeights):
        self.weights = weights  # in their current place: between two chunks they may move
        self._quantized: dict[tuple[str, str], Matrix] = {}

    @property
    def norm1_C(self) -> Tensor:
        return self.weights.norm1_C

    @property
    def norm2_C(self) -> Tensor:
        return self.weights.norm2_C

    def rows(self, name: str) -> Matrix:
        """Return a matrix in the layout of forward GEMMs."""
        return self._layout(name, "rows")

    def columns(self, name: str) -> Matrix:
        """Return a matrix in the layout of input gradients."""
        return self._layout(name, "columns")

    def quantize(self) -> None:
        """Cast all matrices in both layouts."""
        for name in MATRICES:
            self._quantized[name, "rows"] = self._quantized[name, "columns"] = self._cast(name, True, True)

    def _layout(self, name: str, layout: str) -> Matrix:
        if (name, layout) not in self._quantized:
            self._quantized[name, layout] = self._cast(name, layout == "rows", layout == "columns")
        return self._quantized[name, layout]

    @abstractmethod
    def _cast(self, name: str, rows: bool, columns: bool) -> Matrix:
        """Return a matrix in the requested layouts."""


class Fp8LayerWeights(QuantizedLayerWeights[Fp8Tensor]):
    """Weights with one scale each, and the scales of all other operands of the layer."""

    def __init__(self, layer: int, weights: LayerWeights, scales: Scaling, buffers: Fp8Buffers | None = None):
        super().__init__(weights)
        self._layer, self.scales, self._buffers = layer, scales, buffers

    @staticmethod
    def empty_buffers(shapes: Iterable[Sequence[int]], device: torch.device, _scales: Scaling) -> Fp8Buffers:
        """Allocate all matrices of a layer in both layouts, given their shapes."""
        return Fp8Buffers.empty(shapes, device)

    def scale_amax_of(self, *names: str, measure: Callable[..., None]) -> tuple[ScaleAmax, ...]:
        """Return scales and amaxes of this layer; see `DelayedScaling.scale_amax_of`."""
        return self.scales.scale_amax_of(*(scale_name(self._layer, name) for name in names), measure=measure)

    def _cast(self, name: str, rows: bool, columns: bool) -> Fp8Tensor:
        weight = self.weights.matrices[MATRICES.index(name)]
        (scale_amax,) = self.scale_amax_of(name, measure=partial(quantize_fp8, weight))
        layouts = []
        for layout, requested in enumerate((rows, columns)):
            if requested and self._buffers is not None:
                layouts.append(self._buffers[layout][name])
            else:
                shape = (weight.shape, weight.shape[::-1])[layout] if requested else (0,)
                layouts.append(torch.empty(shape, dtype=E4M3, device=weight.device))
        quantize_fp8(weight, scale_amax, layouts[0] if rows else None, layouts[1] if columns else None)
        return Fp8Tensor(layouts[0], layouts[1], scale_amax.scale)
