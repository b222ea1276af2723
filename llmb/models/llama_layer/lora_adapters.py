"""Adapters of all layers as views of two flat buffers, of their weights and of their gradients.

    adapters = LoraAdapters(model, lora, weights, grads)         # flat tensors of `adapter_numel` elements
    adapters.init_weights(seed)
    layer.forward(adapters.weights(3, frozen_weights), ...)
    layer.backward(adapters.weights(3, frozen_weights), adapters.grads(3), accumulate, ...)
    adapters.named["layers.3.q_proj.A"]

A starts as a uniform distribution with the bounds that linear layers have in torch (Kaiming), B at zero: so the first
step has the losses of the base model. Values depend on the seed and on a tensor's name alone.
"""

import math
from typing import Any

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import aligned, layer_weight_shapes
from llmb.config.native.lora_shapes import PROJECTIONS, Shape, adapter_shapes, projection_rows
from llmb.config.offload_plan import Lora
from llmb.models.decoder import parameter_generator
from llmb.models.llama_layer.layer_tensors import LayerWeights
from llmb.models.llama_layer.lora_linears import AdaptedProjection, AdaptedWeight, Adapter


class LoraAdapters:
    """Adapters of a model in given memory."""

    def __init__(self, model: Model, lora: Lora, weights: Tensor, grads: Tensor):
        self.model, self.lora = model, lora
        self.named: dict[str, Tensor] = {}  # weights: A and B of each projection
        self.named_grads: dict[str, Tensor] = {}
        self._layers: list[dict[str, Adapter]] = []
        shapes, first = adapter_shapes(model, lora), 0
        for layer in range(model.layers):
            tensors, first_of_next = _views(weights, shapes, first)
            dtensors, _ = _views(grads, shapes, first)
            self._layers.append(self._adapters(layer, tensors, dtensors))
            first = first_of_next

    def weights(self, layer: int, frozen: LayerWeights) -> LayerWeights:
        """Return the frozen weights of a layer with its adapters."""
        adapters = self._layers[layer]
        adapted = {name: AdaptedWeight(getattr(frozen, name), adapters.get(name)) for name in PROJECTIONS}
        return frozen._replace(**adapted)  # type: ignore[arg-type]

    def grads(self, layer: int) -> LayerWeights:
        """Return what the gradients of a layer's adapters are written to."""
        frozen: dict[str, Any] = dict.fromkeys(layer_weight_shapes(self.model))
        return LayerWeights(**frozen | self._layers[layer])

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set the initial values of all adapters; the memory between them must be zero."""
        for name, tensor in self.named.items():
            if name.endswith(".B"):
                tensor.zero_()
                continue
            generator = parameter_generator(seed, f"lora.{name}", tensor.device)
            bound = 1 / math.sqrt(tensor.shape[1])
            values = torch.empty(tensor.shape, device=tensor.device).uniform_(-bound, bound, generator=generator)
            tensor.copy_(values)

    def _adapters(self, layer: int, tensors: dict[str, Tensor], dtensors: dict[str, Tensor]) -> dict[str, Adapter]:
        adapters, rank = {}, self.lora.rank
        for matrix, projections in projection_rows(self.model, self.lora).items():
            a_RK, da_RK = tensors[f"{matrix}.A"], dtensors[f"{matrix}.A"]
            adapted = []
            for index, (name, first, rows) in enumerate(projections):
                low = slice(index * rank, (index + 1) * rank)
                b_MR, db_MR = tensors[f"{name}.B"], dtensors[f"{name}.B"]
                adapted.append(AdaptedProjection(slice(first, first + rows), low, b_MR, db_MR))
                for named, a, b in ((self.named, a_RK, b_MR), (self.named_grads, da_RK, db_MR)):
                    named |= {f"layers.{layer}.{name}.A": a[low], f"layers.{layer}.{name}.B": b}
            adapters[matrix] = Adapter(self.lora.scale, a_RK, da_RK, tuple(adapted))
        return adapters


def _views(elements: Tensor, shapes: dict[str, Shape], first: int) -> tuple[dict[str, Tensor], int]:
    """Return consecutive tensors from an element on, and where the next begin."""
    tensors = {}
    for name, (rows, width) in shapes.items():
        tensors[name] = elements[first : first + rows * width].view(rows, width)
        first += aligned(rows * width)
    return tensors, first
