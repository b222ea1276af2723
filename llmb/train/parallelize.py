"""Parallelization of a plain model for this rank: each technique is a pass over the model, in a fixed order.

 1. pipeline stages: layers of other ranks are dropped first;
 2. balanced routing, a switch in the plain model;
 3. explicit layers, which have their own collectives and precision, and the precision of everything else;
 4. context parallelism, around attention;
 5. expert parallelism, and 6. tensor parallelism: sharded weights, collectives on activations around the blocks;
 7. recomputation and activation offload, around whole layers as they are by now;
 8. FSDP: memory for what is left of each weight, sharded over the ranks that hold the same, with its master weight;
    until here the model is on the meta device, so no rank ever holds more than its shards;
 9. fp8 weights that are quantized once per step, and initial weights.

CUDA graphs come last, around a micro-batch of the finished model: see `cuda_graphs.py`.
"""

import gc
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
from torch.utils.checkpoint import checkpoint

from llmb.config.native.number_formats import fp8_recipe
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.models.architectures import Network, build_model
from llmb.models.decoder import parameter_generator
from llmb.models.moe import Router
from llmb.ops.quant.delayed_scaling import SCALINGS
from llmb.perfmodel.expert_capacity import initial_capacity_factor
from llmb.perfmodel.shards import gradient_bytes, has_explicit_layers, rank_stages
from llmb.train.activation_offload import offload_activations
from llmb.train.llama_layers import ExplicitLayer, explicit_layers, init_fp8_scaling, use_explicit_layers
from llmb.train.module_class import wrap_forward
from llmb.train.optimizer import Optimizer
from llmb.train.parallel.bucket import BucketFormats
from llmb.train.parallel.context_parallel import ContextParallel, apply_context_parallel
from llmb.train.parallel.expert_parallel import apply_expert_parallel
from llmb.train.parallel.fsdp import ShardedParameters, sharded_parameters
from llmb.train.parallel.mesh import Mesh
from llmb.train.parallel.pipeline_stages import build_stages, tied_copies
from llmb.train.parallel.sequence_parallel import SequenceParallel
from llmb.train.parallel.tensor_parallel import apply_tensor_parallel
from llmb.train.precision import (
    amax_reduction,
    cache_fp8_weights,
    check_fp8_device,
    compute_in_bf16,
    compute_in_fp8,
)


def build_model_parts(config: RunConfig, workload: Training, mesh: Mesh) -> list[Network]:
    """Return the model parts that this rank trains: the whole network, or one per pipeline stage, first to last.

    The last part, called with tokens or a residual and with labels, returns the loss times `loss_weight`.
    """
    model_parts = build_meta_parts(config, workload, mesh)
    for model_part in model_parts:
        sharded = allocate_weights(model_part, config, workload, mesh, mesh.device)
        init_weights(model_part, sharded, workload.seed, mesh.device)
    return model_parts


def init_weights(model_part: Network, sharded: ShardedParameters, seed: int, device: torch.device) -> None:
    """Initialize the allocated weights, in fp32 before they are rounded.

    The values of a parameter depend only on the seed and its name. A rank draws the whole parameter and keeps its
    shard, so every layout starts from the same model, and no rank needs memory for more than one whole parameter.
    """

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        whole = torch.empty(shape, device=device)
        model_part.init_parameter(name, whole, parameter_generator(seed, name, device))
        return whole

    sharded.set_weights(draw)


def allocate_weights(
    model_part: Network, config: RunConfig, workload: Training, mesh: Mesh, device: torch.device
) -> ShardedParameters:
    """Allocate the weights, and what is computed from them once per step."""
    sharded = ShardedParameters(model_part, mesh, bucket_formats(config, workload), device)
    for layer in explicit_layers(model_part):
        layer.weights_stay = not sharded.is_fsdp
    cache_fp8_weights(model_part)
    return sharded


def bucket_formats(config: RunConfig, workload: Training) -> BucketFormats:
    """Return the number formats of weights and gradients, the same at every scale."""
    if config.precision.dtype == "fp32":
        return BucketFormats(torch.float32, False, torch.float32, torch.float32)
    gradients = torch.bfloat16 if gradient_bytes(config) == 2 else torch.float32
    reduced = torch.bfloat16 if workload.reduce_dtype == "bf16" else torch.float32
    return BucketFormats(torch.bfloat16, workload.master_weights == "fp32", gradients, reduced)


def build_optimizer(model_parts: list[Network], workload: Training, mesh: Mesh) -> Optimizer:
    """Build the optimizer of all weights of this rank."""
    parts = [sharded_parameters(model_part) for model_part in model_parts]
    moments = torch.float32 if workload.moments == "fp32" else torch.bfloat16
    return Optimizer(parts, mesh, tied_copies(model_parts), moments, workload.seed)


def build_meta_parts(config: RunConfig, workload: Training, mesh: Mesh) -> list[Network]:
    """Build the parallelized model parts on the meta device."""
    with torch.device("meta"):
        network = build_model(config.model)
        network.context_tokens = workload.seqlen  # of which a rank may have a shard
        model_parts = build_stages(network, mesh)
        for model_part, stage in zip(model_parts, rank_stages(config, mesh.index("pp")), strict=True):
            stage_workload = replace(workload, recompute_layers=stage.recomputed, offload_layers=stage.offloaded)
            apply_passes(model_part, config, stage_workload, mesh)
    return model_parts


def apply_passes(model_part: Network, config: RunConfig, workload: Training, mesh: Mesh) -> None:
    """Apply every pass to a model part, in order; `workload` has its numbers of recomputed and offloaded layers."""
    model_part.loss_weight = 1 / (workload.ga * mesh.parallel.dp_cp_size)
    if workload.balanced_experts:
        balance_experts(model_part)
    if has_explicit_layers(config):
        tp = SequenceParallel(mesh.submesh("tp").get_group(), workload.mbs) if mesh.size("tp") > 1 else None
        cp = ContextParallel(mesh.submesh("cp")) if mesh.size("cp") > 1 else None
        use_explicit_layers(model_part, config.precision.dtype, workload, tp, cp, fp8_recipe(config))
    apply_precision(model_part, config, workload, mesh)
    apply_context_parallel(model_part, mesh)
    apply_expert_parallel(model_part, mesh, initial_capacity_factor(workload))
    apply_tensor_parallel(model_part, mesh)
    apply_recompute(model_part, workload.recompute_layers)
    offload_activations(model_part, first=workload.recompute_layers, layers=workload.offload_layers)
    if workload.gradients == "bf16":
        model_part.cross_entropy = partial(model_part.cross_entropy, accum_dtype=torch.bfloat16)


def apply_precision(model_part: Network, config: RunConfig, workload: Training, mesh: Mesh) -> None:
    """Let what has no explicit forward and backward compute in the dtype of the run, and scale what is in fp8."""
    recipe, fp8_experts = fp8_recipe(config), workload.fp8_experts is not False
    if recipe is not None:
        check_fp8_device(model_part, mesh.device, fp8_experts, recipe)
        reductions = amax_reduction(mesh, recipe)
        if not has_explicit_layers(config):
            new_scaling = partial(SCALINGS[recipe], device=mesh.device, reduce_max=reductions)
            compute_in_fp8(model_part, new_scaling, workload.fp8_fast_accum, fp8_experts)
            return
        init_fp8_scaling(model_part, mesh.device, reductions)
    if config.precision.dtype != "fp32":
        compute_in_bf16(model_part)


def balance_experts(network: Network) -> None:
    """Route tokens to experts evenly, so that a run measures the same work whatever an untrained router selects."""
    if network.model.experts is None:
        raise ConfigError(f"balanced_experts=true: model {network.model.name} has no experts")
    for router in network.modules():
        if isinstance(router, Router):
            router.force_load_balance = True


def apply_recompute(network: Network, layers: int) -> None:
    """Save only the inputs of the first layers, and recompute their activations in the backward pass.

    Explicit layers save slightly more and recompute less.
    """
    for layer in list(network.layers)[:layers]:
        if isinstance(layer, ExplicitLayer):
            layer.recomputed = True
        else:  # layers draw no random numbers, so there is no RNG state to restore
            _import_dynamo()
            wrap_forward(layer, partial(checkpoint, use_reentrant=False, preserve_rng_state=False))


def _import_dynamo() -> None:
    """Import what `checkpoint` imports at its first call, which takes seconds of the first step.

    The import leaves a cycle of frames behind, that of torch.fx.wrap with all its callers: from within a step they
    would keep the model until the garbage collector runs.
    """
    if "torch._dynamo" not in sys.modules:
        import_module("torch._dynamo")
        gc.collect()
