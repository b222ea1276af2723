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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmb.train.checkpoint import plain_name


class Finding(NamedTuple):
    """Something that is not finite; the smallest of several was there first."""

    at: float  # seconds since 1970; 0 for a weight
    text: str


class BadTensor(NamedTuple):
    """What all ranks found together."""

    text: str
    guilty_rank: int | None  # null: every rank found the same, or none found anything


def first_bad_tensor(parts: Sequence[nn.Module], repeat: Callable[[], object]) -> BadTensor:
    """Names it in the order of the computation: weights, then outputs and gradients as `repeat` brings them forth.

    The step is repeated to its end whatever was found, since ranks that compute together must all do the same.
    """
    found = [
        Finding(0.0, f"{trouble} in the weight {plain_name(name)}")
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
def _watching(parts: Sequence[nn.Module], found: list[Finding]) -> Iterator[None]:
    """Adds whatever is not finite as it appears; a module's parts finish before the module does."""
    micro_batch = 0

    def begin(*_: Any) -> None:
        nonlocal micro_batch
        micro_batch += 1

    def look(value: Any, what: str) -> None:
        if trouble := next(filter(None, map(_trouble, _tensors(value))), None):
            found.append(Finding(time.time(), f"{trouble} first in {what}, micro-batch {micro_batch}"))

    def look_both_ways(output: Any, name: str) -> None:
        look(output, f"the output of {name}" if name else "the loss, every output before it being finite")
        for tensor in _tensors(output):
            if tensor.requires_grad:  # sharded weights never show their gradients before they are summed over ranks
                tensor.register_hook(lambda gradient: look(gradient, f"the gradient of the output of {name}"))

    with ExitStack() as hooks:
        hooks.callback(parts[0].register_forward_pre_hook(begin).remove)
        for name, module in (pair for part in parts for pair in part.named_modules()):
            inner = plain_name(name)
            handle = module.register_forward_hook(
                lambda _module, _args, output, inner=inner: look_both_ways(output, inner)
            )
            hooks.callback(handle.remove)
        for name, parameter in (pair for part in parts for pair in part.named_parameters()):
            what = f"the gradient of {plain_name(name)}"
            handle = parameter.register_post_accumulate_grad_hook(lambda weight, what=what: look(weight.grad, what))
            hooks.callback(handle.remove)
        yield


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
