"""Every registered op: its Triton kernel agrees with its reference in outputs, written arguments and gradients."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import op_cases
import pytest
import torch
from op_cases import OP_CASES, OpCase
from torch import Tensor

from llmb.ops.dispatch import registered

pytest.importorskip("triton")
for _module in pkgutil.iter_modules(op_cases.__path__):
    importlib.import_module(f"op_cases.{_module.name}")


@pytest.mark.parametrize("name", sorted(registered()))
def test_op_has_a_case(name: str) -> None:
    assert name in OP_CASES, f"op {name} has no case in tests/ops/op_cases"


@pytest.mark.parametrize("name", sorted(registered()))
def test_kernel_takes_the_arguments_of_the_reference(name: str) -> None:
    """Positions and defaults; a kernel may have more arguments, for tests, or fewer that only the reference needs."""
    reference, kernel = (
        inspect.signature(function).parameters.values()
        for function in (registered()[name].reference, registered()[name].triton)
    )
    for expected, actual in zip(reference, kernel, strict=False):
        assert (actual.kind, actual.default) == (expected.kind, expected.default), f"{actual} instead of {expected}"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for cases in OP_CASES.values() for case in cases])
def test_kernel_matches_reference(case: OpCase, device: torch.device) -> None:
    expected, actual = (dict(run(case, device, kernel)) for kernel in (False, True))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        compare(name, actual[name], tensor, case.tolerance)


def run(case: OpCase, device: torch.device, kernel: bool) -> Iterator[tuple[str, Any]]:
    """Call one implementation; yield its outputs, its arguments as they are afterwards, and gradients of leaves."""
    args, kwargs = case.arguments(device)
    output = (case.op.triton if kernel else case.op.reference)(*args, **kwargs)
    outputs = dict(leaves(output, "output"))
    inputs = dict(leaves([None if i in case.scratch else value for i, value in enumerate(args)], "args"))
    inputs |= dict(leaves(kwargs, "kwargs"))
    yield from outputs.items()
    yield from inputs.items()
    trained = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad and x.is_leaf}
    if trained:
        results = [x for x in outputs.values() if isinstance(x, Tensor) and x.requires_grad]
        generator = torch.Generator().manual_seed(1)
        d_results = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in results]
        gradients = torch.autograd.grad(results, list(trained.values()), d_results, allow_unused=True)
        yield from ((f"gradient of {name}", gradient) for name, gradient in zip(trained, gradients, strict=True))


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All tensors and numbers in nested containers, with the path to each."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name}[{index}]")
    else:
        yield name, value


def compare(name: str, actual: Any, expected: Any, tolerance: float) -> None:
    if not isinstance(expected, Tensor):
        assert type(actual) is type(expected), name
        assert actual == expected or not isinstance(expected, str | int | float | bool), name
        return
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    if not expected.numel():
        return
    if tolerance == 0 or not expected.is_floating_point():
        torch.testing.assert_close(values(actual), values(expected), rtol=0, atol=0, equal_nan=True, msg=prefixed(name))
        return
    if expected.itemsize == 1:
        compare_fp8(name, actual, expected)
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = expected.isfinite()
    largest = expected[finite].abs().max().item() if finite.any() else 0.0
    atol = tolerance * largest
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, equal_nan=True, msg=prefixed(name))


def compare_fp8(name: str, actual: Tensor, expected: Tensor) -> None:
    """Where the last bits of fp32 decide the rounding, the next fp8 number is as good; that is rare."""
    limits = torch.finfo(expected.dtype)
    atol = limits.smallest_normal * limits.eps
    actual, expected = values(actual), values(expected)
    torch.testing.assert_close(actual, expected, rtol=limits.eps, atol=atol, equal_nan=True, msg=prefixed(name))
    different = (actual != expected) & ~expected.isnan()
    assert different.float().mean() <= 0.01, f"{name}: {different.sum()} of {different.numel()} values differ"


def values(tensor: Tensor) -> Tensor:
    """A detached tensor that torch can compare: fp8 becomes fp32."""
    return tensor.detach().float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor.detach()


def prefixed(name: str) -> Any:
    return lambda message: f"{name}: {message}"
