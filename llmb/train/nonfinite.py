"""Search for the first non-finite tensor, and its rank, after a step with a NaN or Inf loss or gradient norm.

The batch of a step can be generated again, and an update with a non-finite norm changes nothing (`optimizer.py`), so
forward and backward of the step are repeated with hooks that check every weight, output and gradient. That is slow,
which does not matter: the run is over.

Non-finite values spread to other ranks through collectives, and appear there later: the rank that saw one first is
where it originated. Weights are checked before everything else.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmb.models.architectures import Network
from llmb.models.moe import GroupedLinear
from llmb.train.parallel.fsdp import sharded_parameters


class NonFiniteTensor(NamedTuple):
    """A non-finite tensor; the smallest of several occurred first."""

    time: float  # seconds since 1970; 0 for a weight
    text: str


class NonFiniteReport(NamedTuple):
    """Result over all ranks."""

    text: str
    failed_rank: int | None  # None: the same on every rank, or nothing found


def find_first_nonfinite(model_parts: Sequence[Network], repeat: Callable[[], object]) -> NonFiniteReport:
    """Return the first one in the order of computation: weights, then outputs and gradients while `repeat` runs.

    The step is always repeated to its end, since all ranks must enter the same collectives.
    """
    nonfinite = [
        NonFiniteTensor(0.0, f"{kind} in the weight {name}")
        for model_part in model_parts
        for name, values in sharded_parameters(model_part).own_values()
        if (kind := _nonfinite_kind(values))
    ]
    with _check_hooks(model_parts, nonfinite):
        repeat()
    return _first_over_ranks(nonfinite[0] if nonfinite else None)


def _first_over_ranks(local: NonFiniteTensor | None) -> NonFiniteReport:
    """Gather the first tensor of each rank and return the earliest, the same on every rank."""
    gathered: list[NonFiniteTensor | None] = [local]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, local)
    by_time = sorted((tensor, rank) for rank, tensor in enumerate(gathered) if tensor is not None)
    if not by_time:
        return NonFiniteReport("every tensor was finite when the step was repeated", None)
    (first, rank), texts = by_time[0], {tensor.text for tensor, _ in by_time}
    if len(gathered) == 1:
        return NonFiniteReport(first.text, 0)
    if len(by_time) == len(gathered) and len(texts) == 1:
        return NonFiniteReport(f"{first.text}, on every rank", None)
    return NonFiniteReport(f"{first.text}, on rank {rank}", rank)


@contextmanager
def _check_hooks(model_parts: Sequence[Network], nonfinite: list[NonFiniteTensor]) -> Iterator[None]:
    """Append every non-finite tensor to `nonfinite` as it appears; submodules finish before their module.

    In a pipeline the backward pass of one micro-batch follows the forward pass of another, so a gradient hook carries
    the micro-batch of its tensor; later gradients, such as those of weights, belong to the same one.
    """
    current = 0  # the micro-batch whose forward or backward pass is running

    def check(value: Any, label: str) -> None:
        if kind := next(filter(None, map(_nonfinite_kind, _tensors(value))), None):
            nonfinite.append(NonFiniteTensor(time.time(), f"{kind} first in {label}"))

    def check_weight_gradient(name: str, weight: Tensor) -> None:
        check(weight.grad, f"the gradient of {name}, micro-batch {current}")

    def check_gradient(label: str, micro_batch: int, rows: int | None, gradient: Tensor) -> None:
        nonlocal current
        current = micro_batch
        check(gradient[:rows] if rows is not None else gradient, f"the gradient of {label}, micro-batch {current}")

    def hook_gradient(value: Any, label: str, rows: int | None = None) -> None:
        for tensor in _tensors(value):
            if tensor.requires_grad:  # gradients of sharded weights are only visible after the reduction
                tensor.register_hook(partial(check_gradient, label, current, rows))

    def begin_micro_batch(model_part: Network, args: Any, numbers: Iterator[int]) -> None:
        nonlocal current
        current = next(numbers)
        # Otherwise the previous stage would be the first to see what originated here.
        hook_gradient(args, f"the residual into {_layer_names(model_part)}")

    def check_output(module: nn.Module, args: Any, output: Any, label: str) -> None:
        rows = int(args[1][-1]) if isinstance(module, GroupedLinear) else None  # the others are padding, and undefined
        check(output[:rows] if rows is not None else output, f"{label}, micro-batch {current}")
        hook_gradient(output, label, rows)

    with ExitStack() as hooks:
        for model_part in model_parts:
            handle = model_part.register_forward_pre_hook(partial(begin_micro_batch, numbers=count(1)))
            hooks.callback(handle.remove)
            for name, module in model_part.named_modules():
                label = f"the output of {name}" if name else _output_name(model_part)
                handle = module.register_forward_hook(partial(check_output, label=label))
                hooks.callback(handle.remove)
            for name, parameter in model_part.named_parameters():
                handle = parameter.register_post_accumulate_grad_hook(partial(check_weight_gradient, name))
                hooks.callback(handle.remove)
        yield


def _output_name(model_part: Network) -> str:
    """Return a readable name of a model part's output."""
    return "the loss" if model_part.last else f"the residual out of {_layer_names(model_part)}"


def _layer_names(model_part: Network) -> str:
    """Return `layers.2` or `layers.2 to layers.5`."""
    names = [f"layers.{number}" for number, _ in model_part.layers.named_children()]
    return " to ".join(dict.fromkeys((names[0], names[-1])))


def _nonfinite_kind(tensor: Tensor) -> str | None:
    """Return `nan` or `inf` if a tensor contains one, else None."""
    tensor = tensor.detach()
    if not tensor.is_floating_point() or torch.isfinite(tensor).all():
        return None
    return "nan" if torch.isnan(tensor).any() else "inf"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
