"""Where a served model's weights come from: drawn at random by name, as training starts, or read from a folder.

    weights.take("layers.3.attention.q.weight", Cut(0, index=1, parts=4))

One tensor at a time, so that a model whose plain weights would never fit can be rounded as it comes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmb.config.spec import Model
from llmb.models.architectures import ARCHITECTURES, Network
from llmb.models.decoder import parameter_generator


@dataclass(frozen=True)
class Cut:
    """A rank's share: part `index` of `parts` equal ones along a dimension."""

    dim: int
    index: int
    parts: int

    def of(self, tensor: Tensor) -> Tensor:
        size = tensor.shape[self.dim] // self.parts
        return tensor.narrow(self.dim, self.index * size, size)


class Weights(Protocol):
    """Gives each tensor of a model by its name in `llmb/models`."""

    def take(self, name: str, cut: Cut | None = None) -> Tensor:
        """The tensor, or this rank's share, on the device; in `dtype`, or in fp32 where it was stored in fewer bits."""
        ...


class RandomWeights:
    """The weights that training with this seed starts from."""

    def __init__(self, model: Model, seed: int, dtype: torch.dtype, device: torch.device):
        self._seed, self._dtype, self._device = seed, dtype, device
        with torch.device("meta"):
            self._network: Network = ARCHITECTURES[model.architecture](model)
        self._shapes = {name: tensor.shape for name, tensor in self._network.state_dict().items()}
        self._parameters = {name for name, _ in self._network.named_parameters()}

    def take(self, name: str, cut: Cut | None = None) -> Tensor:
        whole = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if name in self._parameters:
            self._network.fill(name, whole, parameter_generator(self._seed, name, self._device))
        else:
            whole.zero_()  # the routers' corrections
        return whole if cut is None else cut.of(whole).contiguous()
