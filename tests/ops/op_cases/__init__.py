"""Cases for registered ops: arguments on which a kernel must agree with its reference (test_registered_ops.py).

    @cases(rms_norm, (4, 64), (3, 100), tolerance=2e-5)      # one case for each tuple of parameters
    def fp32(generator, device, n, c):
        return (randn(generator, device, n, c), torch.ones(c, device=device), 1e-5), {}

A case builds positional and keyword arguments from a generator on the CPU. It is called once for each implementation
and must give both the same tensors, so buffers to be written are filled, never `torch.empty`.
"""

from collections.abc import Callable
from dataclasses import dataclass
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

    @property
    def id(self) -> str:
        return "-".join((self.op.name, self.build.__name__, *(str(p).removeprefix("torch.") for p in self.params)))

    def arguments(self, device: torch.device) -> Arguments:
        return self.build(torch.Generator().manual_seed(0), device, *self.params)


def cases(
    op: Op[..., Any], *params: tuple[Any, ...], tolerance: float, scratch: tuple[int, ...] = ()
) -> Callable[[Callable[..., Arguments]], Callable[..., Arguments]]:
    """Register one case of an op for each tuple of parameters, or a single one without parameters."""

    def register(build: Callable[..., Arguments]) -> Callable[..., Arguments]:
        OP_CASES.setdefault(op.name, []).extend(OpCase(op, build, p, tolerance, scratch) for p in params or ((),))
        return build

    return register


def randn(
    generator: torch.Generator, device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1
) -> Tensor:
    """Return normally distributed numbers, the same on every device."""
    return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)
