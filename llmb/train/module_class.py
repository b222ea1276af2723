"""Another forward pass for a module of a plain model, which keeps its parameters, hooks and name.

    use_class(linear, CastLinear)                       # a subclass of its class
    wrap_forward(layer, checkpoint)                     # calls checkpoint(forward, layer, *inputs)

A module changes its class rather than its attribute `forward`, which would be a reference to itself: so a model is
freed as soon as nothing refers to it.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


def use_class(module: nn.Module, module_class: type[nn.Module], **attributes: Any) -> None:
    """Change the class of a module, and set what the class needs."""
    assert issubclass(module_class, type(module))
    module.__class__ = module_class
    vars(module).update(attributes)


def wrap_forward(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace the forward pass by `call`, which gets the function, the module and the inputs."""
    forward = type(module).forward
    wrapped = {"forward": lambda self, *inputs: call(forward, self, *inputs)}
    use_class(module, type(type(module).__name__, (type(module),), wrapped))
