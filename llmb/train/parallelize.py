"""A plain model made ready to train on this rank: each technique is a pass over the finished model, in a fixed order.

 1. pipeline stages: what other ranks compute is dropped first, so that nothing is done to it;
 2. how routers deal tokens, a switch in the plain model;
 3. number format, because it replaces the linear layers that later passes split, or whole layers on one GPU;
 4. context: who holds which tokens of a sequence, around attention;
 5. experts, and 6. tensors: weights cut among ranks, exchanges of activations around the blocks;
 7. what becomes of activations, around whatever the layers have become: computed again or offloaded, whole layers each;
 8. replicas: what is left of each weight, sharded over the ranks that would hold the same;
 9. experts' weights in 8 bits, kept where replicas do not share them;
10. weights: until here the model had shapes only, so no rank ever holds more than its own part;
11. on one rank, the two halves of each weight: see `split_weights.py`.

CUDA graphs come last of all, around a micro-batch of the finished model: see `cuda_graphs.py`.
"""

from dataclasses import replace
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.models.architectures import Network, build_model
from llmb.models.chunked_loss import chunked_cross_entropy
from llmb.models.moe import Router
from llmb.perfmodel.shards import gradient_bytes, is_fused, is_halved, rank_parts
from llmb.train.activation_offload import offload
from llmb.train.fused_llama import FusedLayer, fuse_layers, make_ready
from llmb.train.initial_weights import set_initial_weights
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.context_parallel import split_context
from llmb.train.parallel.expert_parallel import split_experts
from llmb.train.parallel.fsdp import lay_out, shard
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.pipeline import copied_weights, own_parts
from llmb.train.parallel.tensor_parallel import split_tensors
from llmb.train.precision import compute_in_bf16, compute_in_fp8, keep_forms
from llmb.train.split_weights import halve_weights


def ready_parts(config: RunConfig, work: Training, mesh: Mesh) -> list[Network]:
    """What this rank trains: the whole network, or its parts of the pipeline, first to last.

    A last part, called with tokens or a stream and with labels, returns the loss times its share of the step's.
    """
    parts = shaped_parts(config, work, mesh)
    for part in parts:
        part.to_empty(device=mesh.device)
        lay_out(part)
        set_initial_weights(part, work.seed)
        halve(part, config)
    return parts


def halve(part: Network, config: RunConfig) -> None:
    """The last pass, for weights that have values, where this rank has all of them."""
    if is_halved(config):
        assert isinstance(config.workload, Training)
        gradients = torch.bfloat16 if gradient_bytes(config) == 2 else torch.float32
        halve_weights(part, gradients, exact=config.workload.masters == "fp32")
        make_ready(part, config.precision.dtype, config.workload)
        if config.workload.gradients == "bf16":
            part.cross_entropy = partial(chunked_cross_entropy, sums=torch.bfloat16)


def optimizer_of(parts: list[Network], work: Training, mesh: Mesh) -> Optimizer:
    """For all weights of this rank."""
    named = (pair for part in parts for pair in part.named_parameters())
    moments = torch.float32 if work.moments == "fp32" else torch.bfloat16
    return Optimizer(named, mesh, work.lr, copied_weights(parts), moments, work.seed)


def shaped_parts(config: RunConfig, work: Training, mesh: Mesh) -> list[Network]:
    """The same in shape, without memory for weights."""
    with torch.device("meta"):
        parts = own_parts(build_model(config.model), mesh)
        for part, share in zip(parts, rank_parts(config, mesh.index("pp")), strict=True):
            own = replace(work, recompute_layers=share.recomputed, offload_layers=share.offloaded)
            prepare(part, config, own, mesh)
    return parts


def prepare(part: Network, config: RunConfig, work: Training, mesh: Mesh) -> None:
    """Every pass over one part, in order; recomputed and offloaded layers are counted in this part."""
    part.loss_share = 1 / (work.ga * mesh.parallel.sharers)
    if work.balanced_experts:
        balance_experts(part)
    if config.precision.dtype == "bf16":
        compute_in_bf16(part)
    if config.precision.dtype == "fp8":
        compute_in_fp8(part, mesh.device, work.fast_sums)
    if is_fused(config):
        fuse_layers(part)
    split_context(part, mesh)
    split_experts(part, mesh)
    split_tensors(part, mesh)
    recompute(part, work.recompute_layers)
    offload(part, first=work.recompute_layers, layers=work.offload_layers)
    shard(part, mesh, config.precision.dtype)
    keep_forms(part)


def balance_experts(network: Network) -> None:
    """Deal tokens to the experts evenly, so that a run measures the same work whatever an untrained router says."""
    if network.model.experts is None:
        raise ConfigError(f"balanced_experts=true: model {network.model.name} has no experts")
    for router in network.modules():
        if isinstance(router, Router):
            router.forced_balance = True


def recompute(network: Network, layers: int) -> None:
    """Keep only the inputs of the first layers; their insides are computed again in the backward pass.

    Layers that are computed by hand keep a little more, and compute less again.
    """
    for layer in list(network.layers)[:layers]:
        if isinstance(layer, FusedLayer):
            layer.recomputed = True
            continue
        # No random numbers are drawn inside a layer, so there is no generator state to restore.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
