"""FSDP: weights, gradients and optimizer state sharded over the ranks that hold the same ones.

    sharded = ShardedParameters(model_part, mesh, formats, device)      # from now on sharded_parameters(model_part)
    sharded.begin_backward(last)                                        # for each micro-batch, before its backward pass
    sharded.end_backward()                                              # after it
    sharded.end_step()                                                  # after the last one: every gradient is reduced

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmb.models.architectures import Network
from llmb.models.moe import GroupedLinear
from llmb.ops.gemm.weight_gradient import existing_gradient
from llmb.train.parallel.bucket import Bucket, BucketFormats
from llmb.train.parallel.mesh import Mesh, Replicas
from llmb.train.parallel.parameter_shard import box_of, mark_shard, shard_of
from llmb.train.side_stream import SideStream

MATRIX_MODULES = (nn.Linear, nn.Embedding, GroupedLinear)  # whose weights are used in the dtype of activations
Event = torch.cuda.Event | None
Gradients = tuple[list[tuple[Bucket, Tensor | None, Tensor | None]], list[tuple[nn.Parameter, Tensor | None]]]


class Unit:
    """Buckets that are gathered and reduced together, with the collectives in flight."""

    def __init__(self, buckets: Iterable[Bucket]):
        self.buckets = [bucket for bucket in buckets if bucket.is_sharded]
        self._gathered: Event = None
        self._reduced: Event = None
        self._reducing: list[tuple[Tensor, ...]] = []  # gradients in use by a collective

    def start_gather(self, stream: SideStream, overlap: bool) -> None:
        """Start to gather what is not here."""
        if all(bucket.gathered for bucket in self.buckets):
            return
        for bucket in self.buckets:
            bucket.allocate_gathered()  # on the main stream, which frees it
        with stream.running() if overlap else nullcontext():
            for bucket in self.buckets:
                bucket.gather()
        self._gathered = stream.record_event() if overlap else None

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
        with stream.running() if overlap else nullcontext():
            reducing = [bucket.reduce() for bucket in self.buckets]
        if overlap:
            self._reducing, self._reduced = reducing, stream.record_event()

    def wait_reduce(self, stream: SideStream) -> None:
        """Make computation wait for the reduced gradients, and free the others."""
        stream.wait(self._reduced)
        self._reduced, self._reducing = None, []


class ReplicatedParameters:
    """fp32 parameters that all ranks of a group have whole."""

    def __init__(self, unallocated: dict[str, nn.Parameter], replicas: Replicas, device: torch.device):
        self.replicas, self.parameters = replicas, {}
        for name, parameter in unallocated.items():
            weight = self.parameters[name] = nn.Parameter(torch.empty(parameter.shape, device=device))
            mark_shard(weight, *shard_of(parameter))

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
    """All parameters of a model part, allocated and registered in its modules."""

    def __init__(self, model_part: Network, mesh: Mesh, formats: BucketFormats, device: torch.device):
        vars(model_part)["sharded_parameters"] = self
        self._parallel, self._stream = mesh.parallel, SideStream(device)
        matrices: dict[tuple[str, str], dict[str, nn.Parameter]] = defaultdict(dict)  # by unit and replicas
        vectors: dict[str, dict[str, nn.Parameter]] = defaultdict(dict)  # by replicas
        for path, module in model_part.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                replicas = shard_of(parameter).replicas
                is_matrix = isinstance(module, MATRIX_MODULES)
                (matrices[_unit_name(name), replicas] if is_matrix else vectors[replicas])[name] = parameter
        units: dict[str, list[Bucket]] = {"": []}
        for (unit, replicas), parameters in matrices.items():
            bucket = Bucket(parameters, mesh.replicas_of(replicas), formats, device, resident=not mesh.parallel.fsdp)
            units.setdefault(unit, []).append(bucket)
        self.buckets = [bucket for buckets in units.values() for bucket in buckets]
        self.replicated = [
            ReplicatedParameters(parameters, mesh.replicas_of(replicas), device)
            for replicas, parameters in vectors.items()
        ]
        for name, parameter in self.parameters.items():
            owner, _, attribute = name.rpartition(".")
            model_part.get_submodule(owner).register_parameter(attribute, parameter)
        for module in model_part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, torch.zeros_like(buffer, device=device))

        self._root, *self._layers = map(Unit, units.values())
        self._last_backward, self._captured = True, False
        self._pending: Unit | None = None  # whose gradients are being reduced
        is_sharded = any(bucket.is_sharded for bucket in self.buckets)
        self.is_fsdp = mesh.parallel.fsdp and is_sharded
        if is_sharded:
            self._add_hooks(model_part)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name."""
        named = (zip(bucket.names, bucket.parameters, strict=True) for bucket in self.buckets)
        return dict(chain(*named, *(group.parameters.items() for group in self.replicated)))

    def own_values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of every parameter that this rank's optimizer updates."""
        for bucket in self.buckets:
            yield from ((name, bucket.own_part(bucket.shard, number)) for number, name in enumerate(bucket.names))
        for group in self.replicated:
            yield from group.parameters.items()

    @torch.no_grad()
    def set_weights(self, whole: Callable[[str, tuple[int, ...]], Tensor]) -> None:
        """Copy this rank's shards of whole weights, in fp32, which a function returns by name and shape."""
        for bucket in self.buckets:
            for number, (name, parameter) in enumerate(zip(bucket.names, bucket.parameters, strict=True)):
                bucket.set_weight(number, whole(name, parameter.shard.shape))
        for group in self.replicated:
            for name, weight in group.parameters.items():
                shard = shard_of(weight)
                weight.copy_(box_of(whole(name, shard.shape), shard, weight.shape))

    # Gathering and reducing, while the model part runs

    def _add_hooks(self, model_part: Network) -> None:
        units = self._layers
        model_part.register_forward_pre_hook(lambda *_: self._gather(self._root, units[0]), prepend=True)
        for layer, previous, unit, following in zip(
            model_part.layers, [None, *units[:-1]], units, [*units[1:], None], strict=True
        ):
            keep = following is None and model_part.last  # the backward pass of the last layer comes next
            layer.register_forward_pre_hook(partial(self._enter, unit, following), prepend=True)
            layer.register_forward_hook(partial(self._leave, unit, previous, keep))

    def _enter(self, unit: Unit, following: Unit | None, _layer: nn.Module, args: tuple[Tensor, ...]) -> Any:
        self._gather(unit, following)
        return _CallInBackward.apply(args[0], lambda: self._after_backward(unit)), *args[1:]

    def _leave(
        self, unit: Unit, previous: Unit | None, keep: bool, _layer: nn.Module, _args: Any, out: Tensor
    ) -> Tensor:
        if not (keep and torch.is_grad_enabled()):
            unit.free()
        return _CallInBackward.apply(out, lambda: self._gather(unit, previous))

    def _gather(self, unit: Unit, following: Unit | None) -> None:
        """Gather a unit before it computes, and start with the following one."""
        overlap = self._parallel.overlap_gather
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
        unit.start_reduce(self._stream, self._parallel.overlap_reduce)
        if self._pending is not None:
            self._pending.wait_reduce(self._stream)
        self._pending = unit

    def gather_all(self) -> None:
        """Gather all weights that stay for the step, before a CUDA graph uses them."""
        if not self.is_fsdp:
            for unit in (self._root, *self._layers):
                unit.start_gather(self._stream, overlap=False)

    def begin_backward(self, last: bool, captured: bool = False) -> None:
        """Set whether the next backward pass of this model part is its last in the step.

        In a CUDA graph, which is the same for all micro-batches, gradients that accumulate are not reduced.
        """
        self._last_backward, self._captured = last, captured

    def end_backward(self) -> None:
        """Reduce what no layer's backward pass did."""
        if self._root.buckets and self._reduces:
            self._reduce(self._root)
        if self._pending is not None:
            self._pending.wait_reduce(self._stream)
            self._pending = None

    def end_step(self) -> None:
        """Reduce the remaining gradients, after the last backward pass of a step."""
        for unit in (self._root, *self._layers) if self._captured and not self.is_fsdp else ():
            unit.start_reduce(self._stream, overlap=False)
        self._root.free()
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
        buckets = [(bucket, bucket.grads, bucket.grad_shard) for bucket in self.buckets]
        return buckets, [(parameter, parameter.grad) for parameter in self.parameters.values()]

    @gradients.setter
    def gradients(self, gradients: Gradients) -> None:
        for bucket, grads, grad_shard in gradients[0]:
            bucket.grads, bucket.grad_shard = grads, grad_shard
        for parameter, gradient in gradients[1]:
            parameter.grad = gradient

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients to accumulate to."""
        grads = [parameter.grad for parameter in self.parameters.values()]
        return any(grad is not None for grad in (*grads, *(bucket.grad_shard for bucket in self.buckets)))

    def zero_grad(self) -> None:
        """Free all gradients."""
        for bucket in self.buckets:
            bucket.grads = bucket.grad_shard = None
        for parameter in self.parameters.values():
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
