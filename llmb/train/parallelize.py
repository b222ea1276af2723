"""A plain model made ready to train on this rank: each technique is a pass over the finished model, in a fixed order.

1. how routers deal tokens, a switch in the plain model;
2. number format, because it replaces the linear layers that later passes wrap;
3. what becomes of activations, around whatever the layers have become: computed again or offloaded, whole layers each;
4. weights: until here the model had shapes only, so no rank ever holds more than its own part;
5. data parallelism, which needs the real gradients to hook into.

CUDA graphs come last of all, around a micro-batch of the finished model: see `graphs.py`.
"""

from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from llmb.errors import ConfigError
from llmb.models.architectures import Network, build_model
from llmb.models.experts import Router
from llmb.spec import RunConfig, Training
from llmb.train.mesh import Mesh
from llmb.train.offload import offload
from llmb.train.precision import compute_in_bf16, compute_in_fp8


def ready_model(config: RunConfig, work: Training, mesh: Mesh) -> nn.Module:
    """The configured model on this rank's device: called with tokens and labels, it returns the mean loss."""
    with torch.device("meta"):
        network = build_model(config.model)
    if work.balanced_experts:
        balance_experts(network)
    if config.precision.dtype == "bf16":
        compute_in_bf16(network)
    if config.precision.dtype == "fp8":
        compute_in_fp8(network, mesh.device)
    recompute(network, work.recompute_layers)
    offload(network, first=work.recompute_layers, layers=work.offload_layers)
    network.to_empty(device=mesh.device)
    network.init_weights(torch.Generator(mesh.device).manual_seed(work.seed))
    return replicate(network, mesh)


def balance_experts(network: Network) -> None:
    """Deal tokens to the experts evenly, so that a run measures the same work whatever an untrained router says."""
    routers = [module for module in network.modules() if isinstance(module, Router)]
    if not routers:
        raise ConfigError(f"balanced_experts=true: model {network.model.name} has no experts")
    for router in routers:
        router.forced_balance = True


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
