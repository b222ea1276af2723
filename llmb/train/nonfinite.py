"""The first tensor that is not finite, and on which rank, once a step has ended in a loss or norm that is not.

The batch of a step can be made again, and an update by such a norm changes nothing (`optimizer.py`), so the step's
forward and backward passes are repeated as they were, with a look at every weight, output and gradient on the way.
That is slow, which does not matter: the run is over.

What is bad on one rank spreads to others through collectives, and reaches each of them later than it arose: the rank
that found something first is the one it came from. A weight comes before everything.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmb.models.architectures import Network


class Finding(NamedTuple):
    """Something that is not finite; the smallest of several was there first."""

    at: float  # seconds since 1970; 0 for a weight
    text: str


class BadTensor(NamedTuple):
    """What all ranks found together."""

    text: str
    guilty_rank: int | None  # null: every rank found the same, or none found anything


def first_bad_tensor(parts: Sequence[Network], repeat: Callable[[], object]) -> BadTensor:
    """Names it in the order of the computation: weights, then outputs and gradients as `repeat` brings them forth.

    The step is repeated to its end whatever was found, since ranks that compute together must all do the same.
    """
    found = [
        Finding(0.0, f"{trouble} in the weight {name}")
        for part in parts
        for name, parameter in part.named_parameters()
        if (trouble := _trouble(parameter))
    ]
    with _watching(parts, found):
        repeat()
    return _first_of_all(found[0] if found else None)


def _first_of_all(own: Finding | None) -> BadTensor:
    """The same on every rank: who found something first, and what."""
    findings: list[Finding | None] = [own]
    if dist.is_initialized():
        findings = [None] * dist.get_world_size()
        dist.all_gather_object(findings, own)
    by_time = sorted((finding, rank) for rank, finding in enumerate(findings) if finding is not None)
    if not by_time:
        return BadTensor("every tensor was finite when the step was repeated", None)
    (first, rank), texts = by_time[0], {finding.text for finding, _ in by_time}
    if len(findings) == 1:
        return BadTensor(first.text, 0)
    if len(by_time) == len(findings) and len(texts) == 1:
        return BadTensor(f"{first.text}, on every rank", None)
    return BadTensor(f"{first.text}, on rank {rank}", rank)


@contextmanager
def _watching(parts: Sequence[Network], found: list[Finding]) -> Iterator[None]:
    """Adds whatever is not finite as it appears; a module's parts finish before the module does.

    In a pipeline the backward pass of one micro-batch follows the forward pass of another, so a gradient remembers
    which one its tensor is of; what comes after it, such as gradients of weights, is of the same.
    """
    under_way = 0  # the micro-batch whose forward or backward pass this rank is at

    def look(value: Any, what: str) -> None:
        if trouble := next(filter(None, map(_trouble, _tensors(value))), None):
            found.append(Finding(time.time(), f"{trouble} first in {what}"))

    def look_at_weight(name: str, weight: Tensor) -> None:
        summed = isinstance(weight, DTensor)  # over ranks, and maybe over micro-batches before that
        look(weight.grad, f"the gradient of {name}" + ("" if summed else f", micro-batch {under_way}"))

    def look_back(what: str, micro_batch: int, gradient: Tensor) -> None:
        nonlocal under_way
        under_way = micro_batch
        look(gradient, f"the gradient of {what}, micro-batch {under_way}")

    def look_at_gradient(value: Any, what: str) -> None:
        for tensor in _tensors(value):
            if tensor.requires_grad:  # sharded weights never show their gradients before they are summed over ranks
                tensor.register_hook(partial(look_back, what, under_way))

    def begin(part: Network, args: Any, counted: Iterator[int]) -> None:
        nonlocal under_way
        under_way = next(counted)
        # Else the stage before this one would be the first to find what arose here.
        look_at_gradient(args, f"the stream into {_layers_of(part)}")

    def look_both_ways(output: Any, what: str) -> None:
        look(output, f"{what}, micro-batch {under_way}")
        look_at_gradient(output, what)

    with ExitStack() as hooks:
        for part in parts:
            handle = part.register_forward_pre_hook(partial(begin, counted=count(1)))
            hooks.callback(handle.remove)
            for name, module in part.named_modules():
                what = f"the output of {name}" if name else _result(part)
                handle = module.register_forward_hook(
                    lambda _module, _args, output, what=what: look_both_ways(output, what)
                )
                hooks.callback(handle.remove)
            for name, parameter in part.named_parameters():
                handle = parameter.register_post_accumulate_grad_hook(partial(look_at_weight, name))
                hooks.callback(handle.remove)
        yield


def _result(part: Network) -> str:
    """What a part gives, by a name that a reader knows."""
    return "the loss" if part.last else f"the stream out of {_layers_of(part)}"


def _layers_of(part: Network) -> str:
    """`layers.2` or `layers.2 to layers.5`."""
    names = [f"layers.{number}" for number, _ in part.layers.named_children()]
    return " to ".join(dict.fromkeys((names[0], names[-1])))


def _trouble(tensor: Tensor) -> str | None:
    """`nan` or `inf` where this rank's part of a tensor holds one."""
    tensor = tensor.detach()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.is_floating_point() or torch.isfinite(local).all():
        return None
    return "nan" if torch.isnan(local).any() else "inf"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
