"""FSDP: weights, gradients and optimizer state sharded over data-parallel ranks, by torch's `fully_shard`.

    apply_fsdp(model_part, mesh, dtype)            # the last pass over a model part on the meta device
    init_fsdp(model_part)                          # after it has memory
    set_last_backward(model_part, mesh, last)      # for each micro-batch, before its backward pass

fsdp=true (ZeRO-3): a layer is all-gathered for its forward pass, freed, gathered again for its backward pass, and its
gradients are reduce-scattered after every backward pass. fsdp=false (distributed optimizer, ZeRO-1): weights gathered
by the first forward pass of a step stay until the last backward pass; gradients accumulate unsharded in fp32 and are
reduced once, in the last backward pass.

Gradients are summed, never averaged: each rank's loss is already weighted. In bf16 and fp8 weights are gathered in
bf16; weights used in fp32 stay replicated: they are small, and the optimizer reduces their gradients.

A weight is sharded along the first dimension that divides evenly, because torch pads only dimension 0 and mishandles
uneven shards of a weight that is already sharded. A weight without such a dimension stays replicated.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Replicate, Shard

from llmb.models.architectures import Network
from llmb.models.mamba2 import GatedNorm, MambaMixer
from llmb.models.moe import MoE, Router
from llmb.train.optimizer import local
from llmb.train.parallel.local_shards import use_local_shards
from llmb.train.parallel.mesh import Mesh

FP32_MODULES = (Router, MambaMixer, GatedNorm)  # whose direct parameters are used in fp32 for every dtype
BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

# Experts, and model parts with an auxiliary loss, return a view. Nothing here changes one in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def apply_fsdp(model_part: Network, mesh: Mesh, dtype: str) -> None:
    """Shard dense weights over dp and cp and expert-parallel weights over edp, one FSDP group per layer."""
    experts = [mlp for mlp in model_part.modules() if isinstance(mlp, MoE) and _is_expert_parallel(mlp)]
    edp = mesh.size("edp") if experts else 1
    if mesh.parallel.dp_cp_size == edp == 1:
        return
    assert mesh.replicas is not None
    policy = MixedPrecisionPolicy() if dtype == "fp32" else BF16_POLICY
    settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": mesh.parallel.fsdp}
    replicated = _replicate(model_part, mesh, experts)
    # The ignored parameters of each call, not the order of calls, decide the group of a parameter.
    dense = set(model_part.parameters()) - replicated - {weight for mlp in experts for weight in _routed(mlp)}
    if mesh.parallel.dp_cp_size > 1:
        for layer in model_part.layers:
            _fully_shard(layer, mesh.replicas, dense, **settings)
    if edp > 1:
        for mlp in experts:
            _fully_shard(mlp, mesh.submesh("edp"), set(_routed(mlp)) - replicated, **settings)
    # Embedding, norm and head stay gathered from the beginning of forward to the end of backward.
    settings["reshard_after_forward"] = False
    _fully_shard(model_part, mesh.replicas, dense if mesh.parallel.dp_cp_size > 1 else set(), **settings)
    _set_communication(model_part, mesh)


def _fully_shard(module: nn.Module, mesh: DeviceMesh, parameters: set[nn.Parameter], **settings: Any) -> None:
    """Make one FSDP group of those `parameters` inside the module that are not in a group yet."""
    ignored = {parameter for parameter in module.parameters() if parameter not in parameters}
    placement = partial(_shard_placement, ranks=mesh.size())
    fully_shard(module, mesh=mesh, shard_placement_fn=placement, ignored_params=ignored, **settings)


def _shard_placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Return the dimension along which a parameter is sharded; None: replicated."""
    is_sharded = isinstance(parameter, DTensor) and Shard(0) in parameter.placements
    even = [dimension for dimension, size in enumerate(local(parameter).shape) if size % ranks == 0]
    if even:
        return Shard(even[0])
    return None if is_sharded else Shard(0)


def init_fsdp(model_part: Network) -> None:
    """Initialize FSDP after allocation: padded shards are moved now, not in the first forward pass."""
    if isinstance(model_part, FSDPModule):
        model_part._get_fsdp_state()._lazy_init()


def set_last_backward(model_part: Network, mesh: Mesh, last: bool) -> None:
    """Set whether the next backward pass of this model part is its last in the step.

    It only affects the backward pass, so it may be called before or after the forward pass. After the last backward
    pass every gradient is reduced and sharded like its parameter.
    """
    if not isinstance(model_part, FSDPModule):
        return
    model_part.set_is_last_backward(last)
    if not mesh.parallel.fsdp:
        model_part.set_requires_gradient_sync(last)
        model_part.set_reshard_after_backward(last)


def _is_expert_parallel(mlp: MoE) -> bool:
    """Return whether the routed experts are sharded over ep or etp."""
    weight = mlp.gate._parameters["weight"]
    return isinstance(weight, DTensor) and "ep" in (weight.device_mesh.mesh_dim_names or ())


def _routed(mlp: MoE) -> Iterator[nn.Parameter]:
    for grouped in (mlp.gate, mlp.up, mlp.down):
        yield from grouped.parameters()


def _replicate(model_part: Network, mesh: Mesh, experts: list[MoE]) -> set[nn.Parameter]:
    """Turn parameters that are not sharded into replicated DTensors; return them."""
    assert mesh.dense is not None
    routed = {grouped for mlp in experts for grouped in (mlp.gate, mlp.up, mlp.down)}
    replicated = set()
    for module in model_part.modules():
        replicas, submesh = mesh.parallel.dp_cp_size, mesh.dense["dp", "cp", "tp"]
        if module in routed:
            assert mesh.expert is not None
            replicas, submesh = mesh.size("edp"), mesh.expert["edp", "ep", "etp"]
        for name, parameter in list(module.named_parameters(recurse=False)):
            if replicas > 1 and (isinstance(module, FP32_MODULES) or _shard_placement(parameter, replicas) is None):
                module.register_parameter(name, weight := _replicated(parameter, submesh))
                replicated.add(weight)
                use_local_shards(module)
    return replicated


def _replicated(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Replicate a parameter along the first dimensions of a mesh; it is already sharded along the last ones."""
    sharded = parameter.placements if isinstance(parameter, DTensor) else ()
    placements = (*[Replicate()] * (mesh.ndim - len(sharded)), *sharded)
    shape, stride = parameter.shape, parameter.stride()
    local_tensor = local(parameter.detach())
    return nn.Parameter(DTensor.from_local(local_tensor, mesh, placements, run_check=False, shape=shape, stride=stride))


def _set_communication(model_part: Network, mesh: Mesh) -> None:
    """Set sum reduction, prefetching and the overlap of collectives with computation."""
    groups = _fsdp_modules(model_part)  # in the order of the forward pass
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
        if not mesh.parallel.overlap_reduce:
            group.set_custom_reduce_scatter(_ExposedReduceScatter())
        if not mesh.parallel.overlap_gather:
            group.set_custom_all_gather(_ExposedAllGather())
            group.set_modules_to_backward_prefetch([group])  # already gathered: disables prefetching
        elif following is not None:
            group.set_modules_to_forward_prefetch([following])
    if mesh.parallel.overlap_gather:
        # torch's default, the reverse order of all forward passes so far, would gather the last layer once more for
        # the first one: it mistakes the passes of several micro-batches for one.
        backward = [groups[0], *(group for layer in reversed([*model_part.layers]) for group in _fsdp_modules(layer))]
        for group, following in zip(backward, [*backward[1:], backward[-1]], strict=True):
            group.set_modules_to_backward_prefetch([following])


def _fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return the FSDP modules inside a module, itself included."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


class _ExposedAllGather(DefaultAllGather):
    """All-gather that starts after all computation so far; later computation waits for it, so they never overlap."""

    def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if output_tensor.is_cuda:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        return super().__call__(output_tensor, *args, **kwargs)


class _ExposedReduceScatter(DefaultReduceScatter):
    """Reduce-scatter that later computation waits for."""

    def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = super().__call__(output_tensor, *args, **kwargs)
        if output_tensor.is_cuda:
            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
        return work
