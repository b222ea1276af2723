"""Weight initialization of the shards that this rank holds.

The values of a parameter depend only on the seed and its name. A rank with a shard draws the full parameter and keeps
its shard, so every layout starts from the same model, and no rank needs memory for more than one full parameter.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmb.models.architectures import Network
from llmb.models.decoder import parameter_generator
from llmb.train.optimizer import local


@torch.no_grad()
def init_weights(model_part: Network, seed: int) -> None:
    """Initialize the allocated parameters of a model part."""
    for name, parameter in model_part.named_parameters():
        generator = parameter_generator(seed, name, parameter.device)
        if isinstance(parameter, DTensor):
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            model_part.init_parameter(name, full, generator)
            local(parameter).copy_(local_slice(full, parameter))
        else:
            model_part.init_parameter(name, parameter, generator)
    for buffer in model_part.buffers():  # the routers' bias
        buffer.zero_()


def local_slice(full: Tensor, like: DTensor) -> Tensor:
    """Return this rank's shard of a full tensor, sharded like another; needs no communication."""
    shape, offset = compute_local_shape_and_global_offset(full.shape, like.device_mesh, like.placements)
    return full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
