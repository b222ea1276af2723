"""Registration and dispatch of operations: plain torch everywhere, Triton kernels where tensors are on a GPU.

    @op                                          # in norm/rms_norm.py; the decorated function is the reference
    def rms_norm(x_NC, weight_C, eps, out_NC): ...

    rms_norm(x, weight, eps, out)                # norm/rms_norm_triton.py: rms_norm_triton if x is on a GPU
    rms_norm.reference(x, weight, eps, out)      # always plain torch
    rms_norm.triton(x, weight, eps, out)         # always the kernel

The kernel is found by name, `<module>_triton.<name>_triton` (`scaled_add_triton_` for `scaled_add_`), unless another is
given, and imported on first use: a machine without a GPU need not have Triton. `registered()` lists all ops;
`tests/ops/test_registered_ops.py` compares each kernel with its reference and fails for an op without a case.

A dry run (`llmb/train/dry_run`) has meta tensors and no GPU, but must take the GPU path: it first calls
`begin_dry_run`. From then on every tensor counts as one on a GPU, and Triton kernels are reported to a listener instead
of launched, while the code around them allocates as usual. For that, kernel modules are imported with a substitute for
Triton.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache, cached_property, update_wrapper
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar, overload

from torch import Tensor

from llmb.ops.device_capabilities import capabilities

P = ParamSpec("P")
R = TypeVar("R")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on a CPU, without a GPU's instructions
LaunchListener = Callable[[str, tuple[Any, ...], dict[str, Any]], None]  # a kernel's name, arguments and constants
TRITON_MODULES = (  # that kernels import
    "triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda", "triton.tools",
    "triton.tools.tensor_descriptor",
)  # fmt: skip
_ROOT = Path(__file__).parent
_REGISTRY: dict[str, "Op[..., Any]"] = {}
_listener: LaunchListener | None = None


class Op(Generic[P, R]):
    """An operation with a reference in plain torch and a Triton implementation of the same signature."""

    def __init__(self, reference: Callable[P, R], triton: str | None, when: Callable[..., bool] | None):
        self.reference = reference
        self.name = f"{reference.__module__.removeprefix('llmb.ops.')}.{reference.__name__}"
        module, _, function = (triton or "").partition(":")
        self._module = f"llmb.ops.{module}" if module else f"{reference.__module__}_triton"
        self._function = function or _kernel_name(reference.__name__)
        self._when = when
        self._fits = True  # false once a kernel needs more shared memory than the GPU has
        update_wrapper(self, reference)

    @cached_property
    def triton(self) -> Callable[P, R]:
        """The Triton implementation, imported on first use."""
        return getattr(importlib.import_module(self._module), self._function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensor = _first_tensor(args)
        assert tensor is not None, f"op {self.name} needs a tensor among its positional arguments"
        if self._fits and takes_triton(tensor) and (self._when is None or self._when(*args, **kwargs)):
            try:
                return self.triton(*args, **kwargs)
            except Exception as error:
                if type(error).__name__ != "OutOfResources":  # Triton's, raised before anything is launched
                    raise
                self._fits = False
                print(
                    f"fallback: {self.name} runs in plain torch, its kernel does not fit this GPU: {error}", flush=True
                )
        return self.reference(*args, **kwargs)


@overload
def op(reference: Callable[P, R], /) -> Op[P, R]: ...
@overload
def op(
    *, triton: str | None = None, when: Callable[..., bool] | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]: ...


def op(
    reference: Callable[..., Any] | None = None,
    /,
    *,
    triton: str | None = None,
    when: Callable[..., bool] | None = None,
) -> Any:
    """Register a reference as an op, dispatched by the device of its first tensor argument.

    `triton` names the kernel as "kind.module:function" if it does not have its default name. `when`, called with the
    op's arguments, restricts the calls that take the kernel.
    """

    def register(function: Callable[..., Any]) -> Op[..., Any]:
        registered_op: Op[..., Any] = Op(function, triton, when)
        assert registered_op.name not in _REGISTRY, f"op {registered_op.name} is registered twice"
        _REGISTRY[registered_op.name] = registered_op
        return registered_op

    return register if reference is None else register(reference)


def registered() -> dict[str, Op[..., Any]]:
    """Return all ops by name ("norm.rms_norm.rms_norm"), importing every module that may register one."""
    for path in sorted(_ROOT.glob("*/*.py")):
        if not path.stem.endswith("_triton") and path.stem != "__init__":
            importlib.import_module(_module_name(path))
    return dict(_REGISTRY)


def kernel_modules() -> list[str]:
    """Return the names of all modules with Triton kernels."""
    return [_module_name(path) for path in sorted(_ROOT.glob("*/*_triton.py"))]


@cache
def triton_installed() -> bool:
    """Return whether Triton can be imported, without importing it."""
    return find_spec("triton") is not None


def takes_triton(tensor: Tensor) -> bool:
    """Return whether Triton kernels run on this tensor."""
    return is_dry_run() or (tensor.is_cuda and triton_installed() and capabilities(tensor.device).has("triton"))


def on_gpu(tensor: Tensor) -> bool:
    """Return whether to take the GPU implementation of an operation."""
    return is_dry_run() or tensor.is_cuda


def is_dry_run() -> bool:
    """Return whether this process takes the GPU path on meta tensors, without a GPU."""
    return _listener is not None


def begin_dry_run(listener: LaunchListener) -> None:
    """Make this process a dry run, until it exits."""
    global _listener
    _listener = listener
    names = kernel_modules()
    assert not sys.modules.keys() & names, "kernels were imported before the dry run began"
    real = {name: sys.modules.get(name) for name in TRITON_MODULES}
    sys.modules |= _substitute_triton()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        for name, module in real.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _kernel_name(reference: str) -> str:
    """Return the default name of a kernel launcher: `rms_norm_triton`, `scaled_add_triton_`."""
    return f"{reference[:-1]}_triton_" if reference.endswith("_") else f"{reference}_triton"


def _first_tensor(args: Iterable[Any]) -> Tensor | None:
    for argument in args:
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, tuple | list):  # quantized tensors are named tuples
            tensor = _first_tensor(argument)
            if tensor is not None:
                return tensor
    return None


def _module_name(path: Path) -> str:
    return ".".join(("llmb.ops", *path.relative_to(_ROOT).with_suffix("").parts))


class _ReportedKernel:
    """A kernel that is launched as Triton's are, kernel[grid](...), and reported to the listener."""

    def __init__(self, kernel: Callable[..., None]):
        self._name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self._report

    def _report(self, *arguments: Any, **constants: Any) -> None:
        assert _listener is not None
        _listener(self._name, arguments, constants)


def _jit(kernel: Callable[..., None] | None = None, **_options: object) -> object:
    """Stand in for `triton.jit`, with options or without."""
    return _ReportedKernel if kernel is None else _ReportedKernel(kernel)


class _Substitute(ModuleType):
    """A module from which any name can be imported; the kernels that use these names never run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


def _substitute_triton() -> dict[str, ModuleType]:
    """Return substitutes for Triton's modules in which the functions called outside of kernels work."""
    modules: dict[str, ModuleType] = {name: _Substitute(name) for name in TRITON_MODULES}
    triton = modules["triton"]
    triton.jit = _jit  # type: ignore[attr-defined]
    triton.cdiv = lambda size, step: -(-size // step)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda size: 1 << (size - 1).bit_length()  # type: ignore[attr-defined]
    triton.language = modules["triton.language"]  # type: ignore[attr-defined]
    triton.language.constexpr = lambda value: value
    return modules
