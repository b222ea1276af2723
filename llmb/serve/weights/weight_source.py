"""Sources of a served model's weights: random, initialized as for training, or a Hugging Face folder.

    weights.load("layers.3.attention.q.weight", WeightShard(0, index=1, count=4))

Tensors are loaded one at a time, so that a model whose unquantized weights would never fit is quantized as it loads.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.models.architectures import ARCHITECTURES, Network
from llmb.models.decoder import parameter_generator


@dataclass(frozen=True)
class WeightShard:
    """Shard `index` of `count` equal ones along a dimension."""

    dim: int
    index: int
    count: int

    def slice(self, tensor: Tensor) -> Tensor:
        size = tensor.shape[self.dim] // self.count
        return tensor.narrow(self.dim, self.index * size, size)


class WeightSource(Protocol):
    """Loads the tensors of a model by their names in `llmb/models`."""

    def load(self, name: str, shard: WeightShard | None = None) -> Tensor:
        """Return the tensor or a shard on the device; in `dtype`, or in fp32 if it was stored quantized."""
        ...


class RandomWeights:
    """The initial weights of training with this seed."""

    def __init__(self, model: Model, seed: int, dtype: torch.dtype, device: torch.device):
        self._seed, self._dtype, self._device = seed, dtype, device
        with torch.device("meta"):
            self._network: Network = ARCHITECTURES[model.architecture](model)
        self._shapes = {name: tensor.shape for name, tensor in self._network.state_dict().items()}
        self._parameters = {name for name, _ in self._network.named_parameters()}

    def load(self, name: str, shard: WeightShard | None = None) -> Tensor:
        whole = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if name in self._parameters:
            self._network.init_parameter(name, whole, parameter_generator(self._seed, name, self._device))
        else:
            whole.zero_()  # the routers' correction biases
        return whole if shard is None else shard.slice(whole).contiguous()
