"""Both implementations of an op on the arguments of a case, and how their results compare."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from op_cases import OpCase
from torch import Tensor

FULL_SIZE_ROUNDING = {2: 0.003, 1: 1e-3}  # relative error of a bf16 tensor that is rounded once; rare fp8 neighbours


def compare_implementations(case: OpCase, device: torch.device) -> None:
    """Compare outputs, written arguments and gradients of the kernel with those of the reference."""
    expected, actual = (dict(run(case, device, kernel)) for kernel in (False, True))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        (compare_full_size if case.full_size else compare)(name, actual[name], value, case.tolerance)


def run(case: OpCase, device: torch.device, kernel: bool) -> Iterator[tuple[str, Any]]:
    """Call one implementation; yield its outputs, its arguments as they are afterwards, and gradients of leaves.

    An argument that is a view brings its base: what surrounds it must not be touched.
    """
    args, kwargs = case.arguments(device)
    if case.exact and not kernel:
        args = converted(args, case.exact, {})
    output = (case.op.triton if kernel else case.op.reference)(*args, **kwargs)
    outputs = dict(leaves(output, "output"))
    inputs = dict(leaves([None if i in case.scratch else value for i, value in enumerate(args)], "args"))
    inputs |= dict(leaves(kwargs, "kwargs"))
    yield from outputs.items()
    yield from inputs.items()
    if not case.full_size:
        for name, x in inputs.items():
            if isinstance(x, Tensor) and x._base is not None:
                yield f"base of {name}", x._base
    trained = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad and x.is_leaf}
    if trained:
        results = [x for x in outputs.values() if isinstance(x, Tensor) and x.requires_grad]
        generator = torch.Generator().manual_seed(1)
        d_results = [torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in results]
        # Of heads with the other order of tokens and heads in memory: as attention leaves its gradients.
        d_results = [x if x.ndim < 4 else x.transpose(1, 2).contiguous().transpose(1, 2) for x in d_results]
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


def converted(value: Any, dtype: torch.dtype, memo: dict[int, Tensor]) -> Any:
    """Return nested containers with fp32 and bf16 tensors in another dtype; one that occurs twice still does."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() or value.itemsize == 1:
            return value
        if id(value) not in memo:
            memo[id(value)] = value.detach().to(dtype).requires_grad_(value.requires_grad)
        return memo[id(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: converted(getattr(value, f.name), dtype, memo) for f in fields(value)})
    if isinstance(value, tuple):
        items = [converted(item, dtype, memo) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def compare(name: str, actual: Any, expected: Any, tolerance: float) -> None:
    """Compare each number, relative to the largest magnitude of its tensor."""
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


def compare_full_size(name: str, actual: Any, expected: Any, tolerance: float) -> None:
    """Compare whole tensors by their norms: the largest of millions of numbers is far from a typical one."""
    if not isinstance(expected, Tensor) or not actual.is_floating_point() or tolerance == 0:
        compare(name, actual, expected, 0)
        return
    assert actual.shape == expected.shape, name
    rounded, exact = values(actual).double(), values(expected).double()
    error = ((rounded - exact).norm() / exact.norm().clamp(min=1e-30)).item()
    bound = max(tolerance, FULL_SIZE_ROUNDING.get(actual.itemsize, 0.0))
    assert error <= bound, f"{name}: relative error {error:.1e}, more than {bound:.1e}"


def values(tensor: Tensor) -> Tensor:
    """A detached tensor that torch can compare: fp8 becomes fp32."""
    return tensor.detach().float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor.detach()


def prefixed(name: str) -> Any:
    return lambda message: f"{name}: {message}"
