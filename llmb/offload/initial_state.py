"""The weights before training, unit by unit, straight to where each unit lives.

They are those that `Llama(model).init_weights(seed)` gives on the same device: a parameter's numbers depend on the seed
and its name alone. A parameter is drawn whole, in fp32, in memory that nothing else uses yet.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.models.decoder import parameter_generator
from llmb.models.llama import Llama
from llmb.offload.bucket_params import Place, places
from llmb.offload.buffer_views import unit_tensors
from llmb.perfmodel.offload.buffers import Units

Room = Callable[[torch.Size], Tensor]  # fp32 memory on the device for a tensor of this shape


@torch.no_grad()
def set_initial_weights(model: Model, seed: int, weights_of: Callable[[int], Tensor], room: Room) -> None:
    """`weights_of(unit)`: its numbers, wherever they are; `room`: where a parameter can be drawn, one at a time."""
    with torch.device("meta"):
        network = Llama(model)
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    for name, found in _by_parameter(model).items():
        drawn = room(shapes[name])
        network.fill(name, drawn, parameter_generator(seed, name, drawn.device))
        for unit, place in found:
            tensors = unit_tensors(weights_of(unit), Units(model).tensors(unit))
            tensors[place.tensor][place.rows].copy_(drawn[place.source])


def _by_parameter(model: Model) -> dict[str, list[tuple[int, Place]]]:
    """Where the parts of each parameter lie: units and places in them."""
    found: dict[str, list[tuple[int, Place]]] = {}
    for unit, place in _all_places(model):
        found.setdefault(place.name, []).append((unit, place))
    return found


def _all_places(model: Model) -> Iterator[tuple[int, Place]]:
    for unit in range(Units(model).count):
        for place in places(model, unit):
            yield unit, place
