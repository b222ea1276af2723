"""Cases for registered ops: arguments on which a kernel must agree with its reference (test_registered_ops.py).

    @cases(rms_norm, (4, 64), (3, 100), tolerance=2e-5)      # one case for each tuple of parameters
    def fp32(generator, device, n, c):
        return (randn(generator, device, n, c), torch.ones(c, device=device), 1e-5), {}

A case builds positional and keyword arguments from a generator on the CPU. It is called once for each implementation
and must give both the same tensors, so buffers to be written are filled, never `torch.empty`.

`full_size_cases` have the sizes of published models, for a GPU (test_full_size_ops.py): the reference computes in fp64.
"""

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmb.ops.dispatch import Op

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
OP_CASES: dict[str, list["OpCase"]] = {}


@dataclass(frozen=True)
class OpCase:
    """Arguments of one op, and how far its kernel may be from the reference."""

    op: Op[..., Any]
    build: Callable[..., Arguments]
    params: tuple[Any, ...]
    tolerance: float  # relative to the largest magnitude of a tensor (fp8: rare neighbours); 0 means the same bits
    scratch: tuple[int, ...]  # positions of arguments whose contents are undefined after the call
    full_size: bool = False  # on a GPU only, where the tolerance is relative to the norm of a tensor
    exact: torch.dtype | None = None  # dtype in which the reference gets its arguments; None: as they are

    @property
    def id(self) -> str:
        return "-".join((self.op.name, self.build.__name__, *(str(p).removeprefix("torch.") for p in self.params)))

    def arguments(self, device: torch.device) -> Arguments:
        return self.build(torch.Generator().manual_seed(0), device, *self.params)


def cases(
    op: Op[..., Any],
    *params: tuple[Any, ...],
    tolerance: float,
    scratch: tuple[int, ...] = (),
    full_size: bool = False,
    exact: torch.dtype | None = None,
) -> Callable[[Callable[..., Arguments]], Callable[..., Arguments]]:
    """Register one case of an op for each tuple of parameters, or a single one without parameters."""

    def register(build: Callable[..., Arguments]) -> Callable[..., Arguments]:
        op_cases = (OpCase(op, build, p, tolerance, scratch, full_size, exact) for p in params or ((),))
        OP_CASES.setdefault(op.name, []).extend(op_cases)
        return build

    return register


# bf16 and fp8 tensors may have the error of being rounded once in addition.
full_size_cases = partial(cases, full_size=True, exact=torch.float64)


def all_cases(full_size: bool) -> list[OpCase]:
    """Return the cases of all modules of this package."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return [case for op_cases in OP_CASES.values() for case in op_cases if case.full_size == full_size]


PERIOD = 1_000_003  # larger tensors repeat their numbers after a prime, so that no two rows are alike


def randn(
    generator: torch.Generator, device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1
) -> Tensor:
    """Return normally distributed numbers, the same on every device."""
    count = math.prod(shape)
    if count <= PERIOD:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)
    numbers = (torch.randn(PERIOD, generator=generator) * scale).to(device)
    return numbers.repeat(-(-count // PERIOD))[:count].view(shape).to(dtype)


def in_wider_rows(x: Tensor) -> Tensor:
    """Return the same numbers as a slice of wider rows, which no kernel may touch beside it."""
    rows = torch.full((*x.shape[:-1], x.shape[-1] + 24), 7.0, device=x.device).to(x.dtype)
    rows[..., 8:-16] = x
    return rows[..., 8:-16]
