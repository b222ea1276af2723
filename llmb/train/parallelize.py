"""Parallelization of a plain model for this rank: each technique is a pass over the model, in a fixed order.

 1. pipeline stages: layers of other ranks are dropped first;
 2. balanced routing, a switch in the plain model;
 3. precision, because it replaces the linear layers that later passes shard, or whole layers on one GPU;
 4. context parallelism, around attention;
 5. expert parallelism, and 6. tensor parallelism: sharded weights, collectives on activations around the blocks;
 7. recomputation and activation offload, around whole layers as they are by now;
 8. FSDP: what is left of each weight, sharded over the ranks that hold the same;
 9. cached fp8 weights of experts, where they are not sharded over replicas;
10. memory and initial weights: until here the model is on the meta device, so no rank ever holds more than its shards;
11. on one rank, split master weights: see `split_weights.py`.

CUDA graphs come last, around a micro-batch of the finished model: see `cuda_graphs.py`.
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
from llmb.perfmodel.shards import gradient_bytes, has_split_weights, is_fused, rank_stages
from llmb.train.activation_offload import offload_activations
from llmb.train.fused_llama import FusedLayer, fuse_layers, prepare_fused_layers
from llmb.train.initial_weights import init_weights
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.context_parallel import apply_context_parallel
from llmb.train.parallel.expert_parallel import apply_expert_parallel
from llmb.train.parallel.fsdp import apply_fsdp, init_fsdp
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.pipeline import build_stages, tied_copies
from llmb.train.parallel.tensor_parallel import apply_tensor_parallel
from llmb.train.precision import cache_fp8_weights, compute_in_bf16, compute_in_fp8
from llmb.train.split_weights import split_master_weights


def build_model_parts(config: RunConfig, workload: Training, mesh: Mesh) -> list[Network]:
    """Return the model parts that this rank trains: the whole network, or one per pipeline stage, first to last.

    The last part, called with tokens or a residual and with labels, returns the loss times `loss_weight`.
    """
    model_parts = build_meta_parts(config, workload, mesh)
    for model_part in model_parts:
        model_part.to_empty(device=mesh.device)
        init_fsdp(model_part)
        init_weights(model_part, workload.seed)
        apply_split_weights(model_part, config)
    return model_parts


def apply_split_weights(model_part: Network, config: RunConfig) -> None:
    """Split initialized master weights, on one rank, and prepare fused layers."""
    if has_split_weights(config):
        assert isinstance(config.workload, Training)
        gradients = torch.bfloat16 if gradient_bytes(config) == 2 else torch.float32
        split_master_weights(model_part, gradients, exact=config.workload.master_weights == "fp32")
        prepare_fused_layers(model_part, config.precision.dtype, config.workload)
        if config.workload.gradients == "bf16":
            model_part.cross_entropy = partial(chunked_cross_entropy, accum_dtype=torch.bfloat16)


def build_optimizer(model_parts: list[Network], workload: Training, mesh: Mesh) -> Optimizer:
    """Build the optimizer of all weights of this rank."""
    named_parameters = (pair for model_part in model_parts for pair in model_part.named_parameters())
    moments = torch.float32 if workload.moments == "fp32" else torch.bfloat16
    return Optimizer(named_parameters, mesh, workload.lr, tied_copies(model_parts), moments, workload.seed)


def build_meta_parts(config: RunConfig, workload: Training, mesh: Mesh) -> list[Network]:
    """Build the parallelized model parts on the meta device."""
    with torch.device("meta"):
        model_parts = build_stages(build_model(config.model), mesh)
        for model_part, stage in zip(model_parts, rank_stages(config, mesh.index("pp")), strict=True):
            stage_workload = replace(workload, recompute_layers=stage.recomputed, offload_layers=stage.offloaded)
            apply_passes(model_part, config, stage_workload, mesh)
    return model_parts


def apply_passes(model_part: Network, config: RunConfig, workload: Training, mesh: Mesh) -> None:
    """Apply every pass to a model part, in order; `workload` has its numbers of recomputed and offloaded layers."""
    model_part.loss_weight = 1 / (workload.ga * mesh.parallel.dp_cp_size)
    if workload.balanced_experts:
        balance_experts(model_part)
    if config.precision.dtype == "bf16":
        compute_in_bf16(model_part)
    if config.precision.dtype == "fp8":
        compute_in_fp8(model_part, mesh.device, workload.fp8_fast_accum, workload.fp8_experts is not False)
    if is_fused(config):
        fuse_layers(model_part)
    apply_context_parallel(model_part, mesh)
    apply_expert_parallel(model_part, mesh)
    apply_tensor_parallel(model_part, mesh)
    apply_recompute(model_part, workload.recompute_layers)
    offload_activations(model_part, first=workload.recompute_layers, layers=workload.offload_layers)
    apply_fsdp(model_part, mesh, config.precision.dtype)
    cache_fp8_weights(model_part)


def balance_experts(network: Network) -> None:
    """Route tokens to experts evenly, so that a run measures the same work whatever an untrained router selects."""
    if network.model.experts is None:
        raise ConfigError(f"balanced_experts=true: model {network.model.name} has no experts")
    for router in network.modules():
        if isinstance(router, Router):
            router.force_load_balance = True


def apply_recompute(network: Network, layers: int) -> None:
    """Save only the inputs of the first layers, and recompute their activations in the backward pass.

    Fused layers save slightly more and recompute less.
    """
    for layer in list(network.layers)[:layers]:
        if isinstance(layer, FusedLayer):
            layer.recomputed = True
            continue
        # Layers draw no random numbers, so there is no RNG state to restore.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
