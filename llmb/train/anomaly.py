"""The first tensor that is not finite, once a step has ended in a loss or gradient norm that is not.

The batch of a step can be made again, and an update by such a norm changes nothing (`optimizer.py`), so the step's
forward and backward passes are repeated as they were, with a look at every weight, output and gradient on the way.
That is slow, which does not matter: the run is over.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmb.train.checkpoint import plain_name


def first_bad_tensor(model: nn.Module, repeat: Callable[[], object]) -> str:
    """Names it in the order of the computation: weights, then outputs and gradients as `repeat` brings them forth.

    The step is repeated to its end whatever was found, since ranks that compute together must all do the same.
    """
    found = [
        f"{trouble} in the weight {plain_name(name)}"
        for name, parameter in model.named_parameters()
        if (trouble := _trouble(parameter))
    ]
    with _watching(model, found):
        repeat()
    return found[0] if found else "every tensor of this rank was finite when the step was repeated"


@contextmanager
def _watching(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Adds whatever is not finite as it appears; a module's parts finish before the module does."""
    micro_batch = 0

    def begin(*_: Any) -> None:
        nonlocal micro_batch
        micro_batch += 1

    def look(value: Any, what: str) -> None:
        if trouble := next(filter(None, map(_trouble, _tensors(value))), None):
            found.append(f"{trouble} first in {what}, micro-batch {micro_batch}")

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(begin).remove)
        for name, module in model.named_modules():
            inner = plain_name(name)
            what = f"the output of {inner}" if inner else "the loss, every output before it being finite"
            handle = module.register_forward_hook(lambda _module, _args, output, what=what: look(output, what))
            hooks.callback(handle.remove)
        for name, parameter in model.named_parameters():
            what = f"the gradient of {plain_name(name)}"
            handle = parameter.register_post_accumulate_grad_hook(lambda weight, what=what: look(weight.grad, what))
            hooks.callback(handle.remove)
        yield


def _trouble(tensor: Tensor) -> str | None:
    """`nan` or `inf` where a tensor holds one."""
    if not tensor.is_floating_point() or torch.isfinite(tensor).all():
        return None
    return "nan" if torch.isnan(tensor).any() else "inf"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
