"""Where Triton kernels run: the one place that decides between them and plain torch.

A rehearsal (`llmb/train/rehearsal.py`) has tensors without values and no GPU, and still must take the way of one: it
calls `rehearse` first. From then on every tensor counts as one on a GPU, and Triton kernels are named to a listener
instead of launched, while the code around them allocates what it always does. For that the modules of kernels are
imported with a stand-in for Triton, which a machine without a GPU need not have.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

KERNEL_MODULES = (
    "ssd_kernels",
    "ssd_triton",
    "causal_conv_triton",
    "gated_norm_triton",
    "fp8_triton",
    "fp8_forms_triton",
    "fp8_group_forms_triton",
    "rms_norm_triton",
    "latent_heads_triton",
    "rotation_triton",
    "swiglu_triton",
    "fused_activation_triton",
    "cross_entropy_triton",
    "embedding_triton",
    "adam_triton",
    "rms_norm_fp8_triton",
    "swiglu_fp8_triton",
    "scaled_add_triton",
    "visits_triton",
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on a CPU, which knows no GPU's instructions
Listener = Callable[[str, tuple[Any, ...], dict[str, Any]], None]  # a kernel's name, arguments and constants
_listener: Listener | None = None


@cache
def triton_installed() -> bool:
    """Looked up without importing it: a machine without a GPU need not have it."""
    return find_spec("triton") is not None


def takes_triton(tensor: Tensor) -> bool:
    """Whether this tensor is where a Triton kernel can work on it."""
    return rehearsing() or (tensor.is_cuda and triton_installed())


def on_gpu(tensor: Tensor) -> bool:
    """Whether the GPU's form of an operation is to be taken."""
    return rehearsing() or tensor.is_cuda


def rehearsing() -> bool:
    """Whether this process only goes through the motions of one with a GPU."""
    return _listener is not None


def rehearse(listener: Listener) -> None:
    """Make this process one that rehearses, for good."""
    global _listener
    _listener = listener
    real = {name: sys.modules.get(name) for name in ("triton", "triton.language")}
    sys.modules |= _stand_in()
    try:
        for name in KERNEL_MODULES:
            full = f"llmb.kernels.{name}"
            assert full not in sys.modules, f"{full} was imported before the rehearsal began"
            importlib.import_module(full)
    finally:
        for name, module in real.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


class _Unlaunched:
    """A kernel that is called as Triton's are: kernel[grid](...)."""

    def __init__(self, kernel: Callable[..., None]):
        self._name = f"{kernel.__module__}.{kernel.__name__}".removeprefix("llmb.kernels.")

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self._tell

    def _tell(self, *arguments: Any, **constants: Any) -> None:
        assert _listener is not None
        _listener(self._name, arguments, constants)


def _jit(kernel: Callable[..., None] | None = None, **_settings: object) -> object:
    """A decorator, with settings or without."""
    return _Unlaunched if kernel is None else _Unlaunched(kernel)


def _stand_in() -> dict[str, ModuleType]:
    """What the modules of kernels use of Triton outside of kernels."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit = _jit  # type: ignore[attr-defined]
    triton.cdiv = lambda size, step: -(-size // step)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda size: 1 << (size - 1).bit_length()  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    language.constexpr = int  # type: ignore[attr-defined]
    return {"triton": triton, "triton.language": language}
