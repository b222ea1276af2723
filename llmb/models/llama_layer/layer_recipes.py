"""fp8 recipes of a Llama layer by name: its linears, and the weights that these take.

    recipe = LAYER_RECIPES["rowwise"]
    scales = recipe.new_scaling(range(model.layers), device, None)
    weights = recipe.weights(3, layer_weights, scales)

`Fp8ModelWeights` holds the weights of a whole model, one layer at a time, for out-of-core training.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import check_fp8_widths, layer_weight_shapes
from llmb.models.llama_layer.fp8_layer_weights import Fp8LayerWeights, PassName, QuantizedLayerWeights, scale_dtypes
from llmb.models.llama_layer.fp8_linears import Fp8Linears
from llmb.models.llama_layer.layer_tensors import LayerWeights
from llmb.models.llama_layer.scaled_layer_weights import ScaledLayerWeights
from llmb.models.llama_layer.scaled_linears import ScaledLinears
from llmb.ops.quant.delayed_scaling import SCALINGS
from llmb.ops.quant.vector_scaling import VECTOR_SCALINGS, RankReductions

DEFAULT = "tensorwise_delayed"


class LayerRecipe(NamedTuple):
    """Quantization of the operands of a layer's GEMMs."""

    linears: Any  # a subclass of QuantizedLinears: (model, weights, inputs, tp, fp8_fast_accum)
    weights: Any  # a subclass of QuantizedLayerWeights: (layer, weights, scales, buffers)
    new_scaling: Callable[..., Any]  # (indices of layers, device, reductions over ranks)


def _new_tensor_scaling(kind: Any, layers: Iterable[int], device: torch.device, reduce_max: Any = None) -> Any:
    return kind(scale_dtypes(layers), device, reduce_max)


def _new_vector_scaling(
    kind: Any, _layers: Iterable[int], _device: torch.device, reductions: RankReductions | None = None
) -> Any:
    return kind(reductions)


LAYER_RECIPES: dict[str, LayerRecipe] = {
    **{
        name: LayerRecipe(Fp8Linears, Fp8LayerWeights, partial(_new_tensor_scaling, kind))
        for name, kind in SCALINGS.items()
    },
    **{
        name: LayerRecipe(ScaledLinears, ScaledLayerWeights, partial(_new_vector_scaling, kind))
        for name, kind in VECTOR_SCALINGS.items()
    },
}


class Fp8ModelWeights:
    """fp8 weights of a model, one layer at a time."""

    def __init__(self, model: Model, device: torch.device, recipe: str = DEFAULT):
        check_fp8_widths(model)
        self._new_weights = LAYER_RECIPES[recipe].weights
        self.scales = LAYER_RECIPES[recipe].new_scaling(range(model.layers), device)
        shapes = layer_weight_shapes(model).values()
        self._buffers = self._new_weights.empty_buffers(shapes, device, self.scales)
        self._current: tuple[int, PassName] | None = None
        self._layer: QuantizedLayerWeights[Any] | None = None

    def layer(self, layer: int, pass_name: PassName, weights: LayerWeights) -> QuantizedLayerWeights[Any]:
        """Return the weights of a layer for the forward or backward pass."""
        if self._layer is None or self._current != (layer, pass_name):
            self._layer = self._new_weights(layer, weights, self.scales, self._buffers)
            self._current = (layer, pass_name)
        assert self._layer is not None
        self._layer.weights = weights
        return self._layer
