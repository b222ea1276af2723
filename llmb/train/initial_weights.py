"""The weights before training, on whatever part of the model this rank holds.

A parameter's numbers depend on the seed and its name alone. A rank that holds a slice draws the whole parameter and
keeps its slice, so every layout starts from the same model, and no rank needs memory for more than one whole parameter.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmb.models.architectures import Network
from llmb.models.decoder import parameter_generator
from llmb.train.optimizer import local


@torch.no_grad()
def set_initial_weights(part: Network, seed: int) -> None:
    """Fill a part of the network whose memory is there already."""
    for name, parameter in part.named_parameters():
        generator = parameter_generator(seed, name, parameter.device)
        if isinstance(parameter, DTensor):
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            part.fill(name, whole, generator)
            local(parameter).copy_(slice_like(whole, parameter))
        else:
            part.fill(name, parameter, generator)
    for buffer in part.buffers():  # the routers' corrections
        buffer.zero_()


def slice_like(whole: Tensor, pattern: DTensor) -> Tensor:
    """What a rank holds of a whole tensor that is spread like another; needs no communication."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, pattern.device_mesh, pattern.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
