"""FSDP: weights, gradients and optimizer state sharded over the ranks that hold the same ones.

    sharded = ShardedParameters(model_part, mesh, formats)   # the last pass, over unallocated parameters
    sharded.allocate(device)                                 # from now on sharded_parameters(model_part)
    sharded.begin_backward(last)                             # for each micro-batch, before its backward pass
    sharded.end_backward()                                   # after it
    sharded.end_step()                                       # after the last one: every gradient is reduced

A unit is a layer, or what a model part has besides layers. Its matrices are in buckets (`bucket.py`), one for each set
of ranks that hold the same ones: dense matrices, those that tp does not split, experts.

fsdp=true (ZeRO-3): a unit is all-gathered for its forward pass, freed, gathered again for its backward pass, and its
gradients are reduce-scattered after every backward pass. fsdp=false (distributed optimizer, ZeRO-1): weights gathered
by the first forward pass of a step stay; gradients accumulate and are reduced once, in the last backward pass. Either
way a collective overlaps with the computation of the next unit.

Vectors, and matrices that are used in fp32 such as routers, are small: they are replicated, and their gradients are
all-reduced after the last backward pass. Gradients are summed, never averaged: each rank's loss is already weighted.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmb.models.architectures import Network
from llmb.models.moe import GroupedLinear
from llmb.ops.gemm.weight_gradient import existing_gradient
from llmb.train.parallel.bucket import Bucket, BucketFormats
from llmb.train.parallel.mesh import Mesh, Replicas
from llmb.train.parallel.parameter_shard import mark_shard, shard_of
from llmb.train.side_stream import SideStream

MATRIX_MODULES = (nn.Linear, nn.Embedding, GroupedLinear)  # whose weights are used in the dtype of activations
Event = torch.cuda.Event | None
Gradients = tuple[list[tuple[Bucket, Tensor | None, Tensor | None]], list[tuple[nn.Parameter, Tensor | None]]]


class Unit:
    """Buckets that are gathered and reduced together, with the collectives in flight."""

    def __init__(self, buckets: list[Bucket]):
        self.buckets = [bucket for bucket in buckets if bucket.is_sharded]
        self.forward_next: Unit | None = None  # to be gathered while this one computes
        self.backward_next: Unit | None = None
        self._gathered: Event = None
        self._reduced: Event = None
        self._reducing: list[tuple[Tensor, ...]] = []  # gradients in use by a collective

    def start_gather(self, stream: SideStream, overlap: bool) -> None:
        """Start to gather what is not here."""
        if all(bucket.gathered for bucket in self.buckets):
            return
        for bucket in self.buckets:
            bucket.allocate_gathered()  # on the main stream, which frees it
        if not overlap:
            for bucket in self.buckets:
                bucket.gather()
            return
        with stream.running():
            for bucket in self.buckets:
                bucket.gather()
        self._gathered = stream.record_event()

    def wait_gather(self, stream: SideStream) -> None:
        """Make computation wait for the weights."""
        stream.wait(self._gathered)
        self._gathered = None

    def free(self) -> None:
        """Free gathered weights, unless they are resident."""
        for bucket in self.buckets:
            bucket.free()

    def start_reduce(self, stream: SideStream, overlap: bool) -> None:
        """Start to reduce the gradients."""
        if not overlap:
            for bucket in self.buckets:
                bucket.reduce()
            return
        with stream.running():
            self._reducing = [bucket.reduce() for bucket in self.buckets]
        self._reduced = stream.record_event()

    def wait_reduce(self, stream: SideStream) -> None:
        """Make computation wait for the reduced gradients, and free the others."""
        stream.wait(self._reduced)
        self._reduced, self._reducing = None, []


class ReplicatedParameters:
    """fp32 parameters that all ranks of a group have whole."""

    def __init__(self, parameters: dict[str, nn.Parameter], replicas: Replicas):
        self.parameters, self.replicas = parameters, replicas

    @torch.no_grad()
    def reduce(self) -> None:
        """All-reduce the gradients, concatenated; those of unused parameters are zeros."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.replicas.group is None:
            return
        total = torch.cat([existing_gradient(parameter).flatten() for parameter in self.parameters.values()])
        dist.all_reduce(total, group=self.replicas.group)
        totals = total.split([parameter.numel() for parameter in self.parameters.values()])
        for parameter, gradient in zip(self.parameters.values(), totals, strict=True):
            parameter.grad = gradient.view_as(parameter)


class ShardedParameters:
    """All parameters of a model part."""

    def __init__(self, model_part: Network, mesh: Mesh, formats: BucketFormats):
        self._model_part, self._mesh = model_part, mesh
        vars(model_part)["sharded_parameters"] = self
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        units: dict[str, dict[str, dict[str, nn.Parameter]]] = defaultdict(lambda: defaultdict(dict))
        replicated: dict[str, dict[str, nn.Parameter]] = defaultdict(dict)
        for path, module in model_part.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full_name = f"{path}.{name}" if path else name
                self._owners[full_name] = module, name
                replicas = shard_of(parameter).replicas
                if isinstance(module, MATRIX_MODULES):
                    units[_unit_name(full_name)][replicas][full_name] = parameter
                else:
                    replicated[replicas][full_name] = parameter
        self.buckets: list[Bucket] = []
        self._units: dict[str, Unit] = {}
        for name, by_replicas in units.items():
            buckets = [
                Bucket(parameters, mesh.replicas_of(replicas), formats) for replicas, parameters in by_replicas.items()
            ]
            self.buckets += buckets
            self._units[name] = Unit(buckets)
        self._unallocated = replicated
        self.replicated: list[ReplicatedParameters] = []
        self._last_backward, self._captured = True, False
        self._pending: Unit | None = None  # whose gradients are being reduced
        self.is_fsdp = mesh.parallel.fsdp and any(bucket.is_sharded for bucket in self.buckets)

    def allocate(self, device: torch.device) -> None:
        """Allocate all parameters and buffers, and register the parameters in their modules."""
        self._stream = SideStream(device)
        for bucket in self.buckets:
            for name, parameter in bucket.allocate(device, resident=not self.is_fsdp).items():
                self._register(name, parameter)
        for replicas, parameters in self._unallocated.items():
            allocated = {}
            for name, unallocated in parameters.items():
                weight = allocated[name] = nn.Parameter(torch.empty(unallocated.shape, device=device))
                mark_shard(weight, *shard_of(unallocated))
                self._register(name, weight)
            self.replicated.append(ReplicatedParameters(allocated, self._mesh.replicas_of(replicas)))
        for module in self._model_part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, torch.zeros_like(buffer, device=device))
        if any(unit.buckets for unit in self._units.values()):
            self._add_hooks()

    def _register(self, name: str, parameter: nn.Parameter) -> None:
        module, attribute = self._owners[name]
        module.register_parameter(attribute, parameter)

    def own_values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of every parameter that this rank's optimizer updates."""
        for bucket in self.buckets:
            yield from ((name, bucket.own_part(bucket.shard, number)) for number, name in enumerate(bucket.names))
        for group in self.replicated:
            yield from group.parameters.items()

    # Gathering and reducing, while the model part runs

    def _add_hooks(self) -> None:
        root = self._units.get("")
        layers = [
            (layer, self._units[f"layers.{number}"]) for number, layer in self._model_part.layers.named_children()
        ]
        for (_, unit), (_, following) in pairwise(layers):
            unit.forward_next, following.backward_next = following, unit
        if root is not None and layers:
            root.forward_next = layers[0][1]
        if root is not None:
            self._model_part.register_forward_pre_hook(lambda *_: self._gather(root, root.forward_next), prepend=True)
        for layer, unit in layers:
            is_last = unit is layers[-1][1] and self._model_part.last
            layer.register_forward_pre_hook(lambda _layer, args, unit=unit: self._enter(unit, args), prepend=True)
            layer.register_forward_hook(
                lambda _layer, _args, out, unit=unit, keep=is_last: self._leave(unit, out, keep)
            )

    def _enter(self, unit: Unit, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._gather(unit, unit.forward_next)
        return _CallInBackward.apply(args[0], lambda: self._after_backward(unit)), *args[1:]

    def _leave(self, unit: Unit, out: Tensor, keep: bool) -> Tensor:
        if not (keep and torch.is_grad_enabled()):  # the backward pass of the last layer comes next
            unit.free()
        return _CallInBackward.apply(out, lambda: self._gather(unit, unit.backward_next))

    def _gather(self, unit: Unit, following: Unit | None) -> None:
        """Gather a unit before it computes, and start with the following one."""
        overlap = self._mesh.parallel.overlap_gather
        unit.start_gather(self._stream, overlap)
        unit.wait_gather(self._stream)
        if following is not None and overlap:
            following.start_gather(self._stream, overlap)

    def _after_backward(self, unit: Unit) -> None:
        if self.is_fsdp:
            unit.free()
        if self._reduces:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        unit.start_reduce(self._stream, self._mesh.parallel.overlap_reduce)
        if self._pending is not None:
            self._pending.wait_reduce(self._stream)
        self._pending = unit

    def gather_all(self) -> None:
        """Gather all weights that stay for the step, before a CUDA graph uses them."""
        if not self.is_fsdp:
            for unit in self._units.values():
                unit.start_gather(self._stream, overlap=False)

    def begin_backward(self, last: bool, captured: bool = False) -> None:
        """Set whether the next backward pass of this model part is its last in the step.

        In a CUDA graph, which is the same for all micro-batches, gradients that accumulate are not reduced.
        """
        self._last_backward, self._captured = last, captured

    def end_backward(self) -> None:
        """Reduce what no layer's backward pass did."""
        root = self._units.get("")
        if root is not None and root.buckets and self._reduces:
            self._reduce(root)
        if self._pending is not None:
            self._pending.wait_reduce(self._stream)
            self._pending = None

    def end_step(self) -> None:
        """Reduce the remaining gradients, after the last backward pass of a step."""
        for unit in self._units.values():
            if self._captured and not self.is_fsdp:
                unit.start_reduce(self._stream, overlap=False)
        if (root := self._units.get("")) is not None:
            root.free()
        for bucket in self.buckets:
            if not bucket.is_sharded:
                bucket.reduce()
        for replicated in self.replicated:
            replicated.reduce()

    @property
    def _reduces(self) -> bool:
        return self.is_fsdp or (self._last_backward and not self._captured)

    @property
    def gradients(self) -> Gradients:
        """Gradients so far in this step; what a CUDA graph writes can be set again."""
        parameters = [*self._model_part.parameters()]
        return [(b, b.grads, b.grad_shard) for b in self.buckets], [(p, p.grad) for p in parameters]

    @gradients.setter
    def gradients(self, gradients: Gradients) -> None:
        for bucket, grads, grad_shard in gradients[0]:
            bucket.grads, bucket.grad_shard = grads, grad_shard
        for parameter, gradient in gradients[1]:
            parameter.grad = gradient

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients to accumulate to."""
        parameters = self._model_part.parameters()
        return any(b.grad_shard is not None for b in self.buckets) or any(p.grad is not None for p in parameters)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for bucket in self.buckets:
            bucket.zero_grad()
        for replicated in self.replicated:
            for parameter in replicated.parameters.values():
                parameter.grad = None


class _CallInBackward(torch.autograd.Function):
    """Identity that calls a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        ctx.function = function
        return x.data  # not a view, which would hold its base after the memory of a sent output is freed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return grad, None


def _unit_name(name: str) -> str:
    """Return `layers.3` of a parameter in a layer, and an empty name of any other."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else ""


def sharded_parameters(model_part: nn.Module) -> ShardedParameters:
    """Return the parameters of a model part that is built for training."""
    sharded = vars(model_part)["sharded_parameters"]
    assert isinstance(sharded, ShardedParameters)
    return sharded
