"""The three forms of the SSD scan give the same outputs and gradients."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases.mamba import scan_inputs
from torch import Tensor

from llmb.ops.mamba.ssd import ssd, ssd_sequential

pytest.importorskip("triton")

NAMES = ("y", "x", "dt", "a", "b", "c", "d")
# B sequences, T tokens, H heads, P head width, G groups, N state, L chunk
SHAPES = {
    "one group": (2, 48, 4, 8, 1, 16, 16),
    "groups, partial last chunk": (1, 37, 6, 8, 3, 5, 16),
    "a group for each head": (2, 21, 2, 3, 2, 7, 8),
    "shorter than a chunk": (1, 5, 4, 16, 2, 16, 32),
    "one token": (1, 1, 2, 4, 1, 4, 16),
    "chunk of one": (1, 6, 2, 4, 1, 4, 1),
    "long chunks": (1, 90, 1, 20, 1, 70, 75),
}


def inputs(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    batch, tokens, *sizes, _ = shape
    tensors = scan_inputs(torch.Generator().manual_seed(sum(shape)), torch.device("cpu"), (batch, tokens), *sizes)
    return [tensor.to(dtype) for tensor in tensors]


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], *arguments: int) -> list[Tensor]:
    """Return y and the gradients of a sum of y with fixed random weights."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    y = function(*tensors, *arguments)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), tensors)]


def assert_close(actual: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for name, tensor, expected in zip(NAMES, actual, exact, strict=True):
        assert tensor.shape == expected.shape, name
        error = ((tensor.cpu().double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_chunked_scan_matches_the_recurrence(shape: tuple[int, ...]) -> None:
    exact = with_gradients(ssd_sequential, inputs(shape))
    assert_close(with_gradients(ssd.reference, inputs(shape), shape[-1]), exact, 1e-11)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 40), share=st.integers(1, 3), groups=st.integers(1, 3), state=st.integers(1, 6),
    chunk=st.integers(1, 24),
)  # fmt: skip
def test_chunks_of_any_size(tokens: int, share: int, groups: int, state: int, chunk: int) -> None:
    shape = (2, tokens, share * groups, 3, groups, state, chunk)
    tensors = inputs(shape)
    torch.testing.assert_close(ssd.reference(*tensors, chunk), ssd_sequential(*tensors), rtol=1e-10, atol=1e-10)


def test_fp32_stays_close_to_the_exact_result() -> None:
    shape = SHAPES["one group"]
    exact = with_gradients(ssd_sequential, inputs(shape))
    rounded = inputs(shape, torch.float32)
    assert_close(with_gradients(ssd.reference, rounded, shape[-1]), exact, 1e-5)
    assert_close(with_gradients(ssd_sequential, rounded), exact, 1e-5)


def test_bf16_rounds_only_inputs_and_output() -> None:
    shape = SHAPES["one group"]
    x, dt, a, b, c, d = inputs(shape, torch.float32)
    x, b, c = x.bfloat16(), b.bfloat16(), c.bfloat16()
    exact = ssd_sequential(*(tensor.double() for tensor in (x, dt, a, b, c, d)))
    y = ssd.reference(x, dt, a, b, c, d, shape[-1])
    assert y.dtype == torch.bfloat16
    assert (y - exact).abs().max() / exact.abs().max() < 4e-3  # rounding of the result alone


def test_no_decay_and_total_decay() -> None:
    """a = 0 sums all earlier tokens; a very negative one leaves only the token itself. Neither overflows."""
    x, dt, _, b, c, d = inputs((1, 40, 2, 4, 1, 4, 16))
    for rate in (0.0, -1e4):
        a = torch.full((2,), rate, dtype=torch.float64)
        exact = with_gradients(ssd_sequential, [x, dt, a, b, c, d])
        actual = with_gradients(ssd.reference, [x, dt, a, b, c, d], 16)
        assert all(tensor.isfinite().all() for tensor in actual)
        assert_close(actual, exact, 1e-11)


@pytest.mark.slow
def test_kernels_on_slices(device: torch.device) -> None:
    """As in a mixer: x, b and c are slices of one tensor, and the gradient is expanded from a scalar."""
    x, dt, a, b, c, d = (tensor.to(device) for tensor in inputs((2, 20, 4, 8, 2, 8, 16), torch.float32))
    joined = torch.cat((x.flatten(2), b.flatten(2), c.flatten(2)), dim=-1)
    sections = joined.split((32, 16, 16), dim=-1)
    views = [section.unflatten(-1, (-1, 8)).detach().requires_grad_() for section in sections]
    assert not views[0].is_contiguous()
    contiguous = [tensor.detach().requires_grad_() for tensor in (x, b, c)]
    for actual, expected in zip(
        torch.autograd.grad(ssd.triton(views[0], dt, a, views[1], views[2], d, 16).sum(), views),
        torch.autograd.grad(ssd.triton(contiguous[0], dt, a, contiguous[1], contiguous[2], d, 16).sum(), contiguous),
        strict=True,
    ):
        assert torch.equal(actual, expected)
