"""A plain model made ready to train on this rank: each technique is a pass over the finished model, in a fixed order.

1. number format, because it replaces the linear layers that later passes wrap;
2. recomputation of whole layers, around whatever the layers have become;
3. weights: until here the model had shapes only, so no rank ever holds more than its own part;
4. data parallelism, which needs the real gradients to hook into.
"""

from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from llmb.models.architectures import Network, build_model
from llmb.spec import RunConfig, Training
from llmb.train.mesh import Mesh
from llmb.train.precision import compute_in_bf16


def ready_model(config: RunConfig, work: Training, mesh: Mesh) -> nn.Module:
    """The configured model on this rank's device: called with tokens and labels, it returns the mean loss."""
    with torch.device("meta"):
        network = build_model(config.model)
    if config.precision.dtype == "bf16":
        compute_in_bf16(network)
    recompute(network, work.recompute_layers)
    network.to_empty(device=mesh.device)
    network.init_weights(torch.Generator(mesh.device).manual_seed(work.seed))
    return replicate(network, mesh)


def recompute(network: Network, layers: int) -> None:
    """Keep only the inputs of the first layers; their insides are computed again in the backward pass."""
    for layer in network.layers[:layers]:
        # No random numbers are drawn inside a layer, so there is no generator state to restore.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def replicate(network: Network, mesh: Mesh) -> nn.Module:
    """One copy a rank; gradients are averaged over ranks while the backward pass still runs."""
    if mesh.world_size == 1:
        return network
    return DistributedDataParallel(network, gradient_as_bucket_view=True)
