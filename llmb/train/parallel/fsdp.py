"""Weights, gradients and optimizer state sharded over the ranks that would hold the same, by torch's `fully_shard`.

    shard(part, mesh, dtype)                 # the last pass over a part, which has shapes only
    lay_out(part)                            # once it has memory
    before_micro_batch(part, mesh, last)     # each time, before the backward pass at the latest

fsdp=true (ZeRO-3): a layer is gathered for its forward pass, let go, gathered again for its backward pass, and its
gradients are reduced after every backward pass. fsdp=false (a sharded optimizer): what the first forward pass of a step
gathers stays until the last backward pass, gradients add up whole, in fp32, and are reduced once, in the last.

Gradients are summed, never averaged: each rank's loss already is its share of the step's. In bf16 and fp8 weights
travel in bf16, and what is computed with in fp32 stays whole: it is small, and the optimizer adds up its gradients.

A weight is cut along the first dimension that divides evenly, because torch pads nothing but dimension 0 and, where a
weight is split already, takes uneven slices for others than they are. A weight without such a dimension stays whole.
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
from llmb.models.moe import ExpertMlp, Router
from llmb.train.optimizer import local
from llmb.train.parallel.local_shards import see_local
from llmb.train.parallel.mesh import Mesh

WHOLE = (Router, MambaMixer, GatedNorm)  # whose own parameters are used in fp32 in every number format
TRAVEL = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

# A view comes out of experts, and of a part with a loss of its own. Nothing here changes one in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def shard(part: Network, mesh: Mesh, dtype: str) -> None:
    """Shard what is left of each weight: dense ones over dp and cp, split experts over edp, each layer by itself."""
    experts = [mlp for mlp in part.modules() if isinstance(mlp, ExpertMlp) and _is_split(mlp)]
    edp = mesh.size("edp") if experts else 1
    if mesh.parallel.sharers == edp == 1:
        return
    assert mesh.replicas is not None
    policy = MixedPrecisionPolicy() if dtype == "fp32" else TRAVEL
    settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": mesh.parallel.fsdp}
    whole = _keep_whole(part, mesh, experts)
    # What each call is told to ignore, not which comes first, decides where a parameter belongs.
    dense = set(part.parameters()) - whole - {weight for mlp in experts for weight in _routed(mlp)}
    if mesh.parallel.sharers > 1:
        for layer in part.layers:
            _fully_shard(layer, mesh.replicas, dense, **settings)
    if edp > 1:
        for mlp in experts:
            _fully_shard(mlp, mesh.sub("edp"), set(_routed(mlp)) - whole, **settings)
    # Embedding, norm and head stay from the beginning of the forward pass to the end of the backward pass.
    settings["reshard_after_forward"] = False
    _fully_shard(part, mesh.replicas, dense if mesh.parallel.sharers > 1 else set(), **settings)
    _schedule(part, mesh)


def _fully_shard(module: nn.Module, mesh: DeviceMesh, chosen: set[nn.Parameter], **settings: Any) -> None:
    """Of the chosen parameters, those inside the module that are not in a group yet become one."""
    ignored = {parameter for parameter in module.parameters() if parameter not in chosen}
    cut = partial(_cut, ranks=mesh.size())
    fully_shard(module, mesh=mesh, shard_placement_fn=cut, ignored_params=ignored, **settings)


def _cut(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Along which dimension a parameter is cut into slices; none: not at all."""
    split = isinstance(parameter, DTensor) and Shard(0) in parameter.placements
    even = [dimension for dimension, size in enumerate(local(parameter).shape) if size % ranks == 0]
    if even:
        return Shard(even[0])
    return None if split else Shard(0)


def lay_out(part: Network) -> None:
    """Once a part has memory: slices that must be padded move now, and not in the first forward pass."""
    if isinstance(part, FSDPModule):
        part._get_fsdp_state()._lazy_init()


def before_micro_batch(part: Network, mesh: Mesh, last: bool) -> None:
    """Whether the next backward pass of this part is its last in the step.

    All that depends on it happens in the backward pass, so it may be told before the forward pass or after. Nothing
    else need be called: after the last backward pass every gradient is there, sharded as its parameter is.
    """
    if not isinstance(part, FSDPModule):
        return
    part.set_is_last_backward(last)
    if not mesh.parallel.fsdp:
        part.set_requires_gradient_sync(last)
        part.set_reshard_after_backward(last)


def _is_split(mlp: ExpertMlp) -> bool:
    """Whether the routed experts are spread over ranks in a way of their own."""
    weight = mlp.gate._parameters["weight"]
    return isinstance(weight, DTensor) and "ep" in (weight.device_mesh.mesh_dim_names or ())


def _routed(mlp: ExpertMlp) -> Iterator[nn.Parameter]:
    for grouped in (mlp.gate, mlp.up, mlp.down):
        yield from grouped.parameters()


def _keep_whole(part: Network, mesh: Mesh, experts: list[ExpertMlp]) -> set[nn.Parameter]:
    """Parameters that are not cut become DTensors that all replicas hold; returns them."""
    assert mesh.dense is not None
    routed = {grouped for mlp in experts for grouped in (mlp.gate, mlp.up, mlp.down)}
    whole = set()
    for module in part.modules():
        replicas, spread = mesh.parallel.sharers, mesh.dense["dp", "cp", "tp"]
        if module in routed:
            assert mesh.expert is not None
            replicas, spread = mesh.size("edp"), mesh.expert["edp", "ep", "etp"]
        for name, parameter in list(module.named_parameters(recurse=False)):
            if replicas > 1 and (isinstance(module, WHOLE) or _cut(parameter, replicas) is None):
                module.register_parameter(name, replicated := _replicated(parameter, spread))
                whole.add(replicated)
                see_local(module)
    return whole


def _replicated(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """The same along all dimensions of a mesh but the last ones, along which it is split already."""
    split = parameter.placements if isinstance(parameter, DTensor) else ()
    placements = (*[Replicate()] * (mesh.ndim - len(split)), *split)
    shape, stride = parameter.shape, parameter.stride()
    slices = local(parameter.detach())
    return nn.Parameter(DTensor.from_local(slices, mesh, placements, run_check=False, shape=shape, stride=stride))


def _schedule(part: Network, mesh: Mesh) -> None:
    """Sums, and when they and the gathering run: beside the computation unless the layout says otherwise."""
    units = _sharded(part)  # in the order of the forward pass
    for unit, following in zip(units, [*units[1:], None], strict=True):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if not mesh.parallel.overlap_reduce:
            unit.set_custom_reduce_scatter(_ReduceAlone())
        if not mesh.parallel.overlap_gather:
            unit.set_custom_all_gather(_GatherAlone())
            unit.set_modules_to_backward_prefetch([unit])  # it has been gathered: nothing is fetched ahead
        elif following is not None:
            unit.set_modules_to_forward_prefetch([following])
    if mesh.parallel.overlap_gather:
        # Torch's own guess, what came before in the forward passes so far, would gather the last layer once more for
        # the first one: it takes the passes of several micro-batches for one.
        backward = [units[0], *(unit for layer in reversed([*part.layers]) for unit in _sharded(layer))]
        for unit, following in zip(backward, [*backward[1:], backward[-1]], strict=True):
            unit.set_modules_to_backward_prefetch([following])


def _sharded(module: nn.Module) -> list[FSDPModule]:
    """The module and those inside it, as far as they are gathered by themselves."""
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


class _GatherAlone(DefaultAllGather):
    """Begins when all computation so far is done. What comes next waits for it anyway, so the two never overlap."""

    def __call__(self, output_tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        if output_tensor.is_cuda:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        return super().__call__(output_tensor, *arguments, **more)


class _ReduceAlone(DefaultReduceScatter):
    """Computation goes on only when it is done."""

    def __call__(self, output_tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        work = super().__call__(output_tensor, *arguments, **more)
        if output_tensor.is_cuda:
            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
        return work
