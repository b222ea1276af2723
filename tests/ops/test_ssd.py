"""The three forms of the state-space recurrence give the same numbers, and so do their gradients."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmb.ops.mamba.ssd import ssd, ssd_chunked, ssd_reference

pytest.importorskip("triton")
from llmb.ops.mamba.ssd_triton import ssd_triton

NAMES = ("y", "x", "dt", "a", "b", "c", "d")
# B sequences, T tokens, H heads, P head width, G groups, N state, L chunk
SHAPES = {
    "one group": (2, 48, 4, 8, 1, 16, 16),
    "groups, a part of a chunk left": (1, 37, 6, 8, 3, 5, 16),
    "a group for each head": (2, 21, 2, 3, 2, 7, 8),
    "shorter than a chunk": (1, 5, 4, 16, 2, 16, 32),
    "one token": (1, 1, 2, 4, 1, 4, 16),
    "chunk of one": (1, 6, 2, 4, 1, 4, 1),
}
# Those that cut chunks, states and widths into several tiles, none of which they fill.
TILED = {
    "tiles": (1, 140, 2, 16, 1, 16, 128),
    "tiles not filled": (1, 90, 1, 20, 1, 70, 75),
}


def inputs(shape: Sequence[int], dtype: torch.dtype = torch.float64, size: float = 1.0) -> list[Tensor]:
    batch, tokens, heads, width, groups, state, _ = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    tensors = [
        normal(batch, tokens, heads, width) * size,
        F.softplus(normal(batch, tokens, heads)),
        -normal(heads).exp(),
        normal(batch, tokens, groups, state),
        normal(batch, tokens, groups, state),
        normal(heads),
    ]
    return [one.to(dtype) for one in tensors]


def with_gradients(form: Callable[..., Tensor], tensors: list[Tensor], *rest: int) -> list[Tensor]:
    """y, and the gradients of a sum of y with fixed random weights."""
    tensors = [one.detach().requires_grad_() for one in tensors]
    y = form(*tensors, *rest)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), tensors)]


def assert_near(ours: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for name, one, wanted in zip(NAMES, ours, exact, strict=True):
        assert one.shape == wanted.shape, name
        error = ((one.cpu().double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("shape", (SHAPES | TILED).values(), ids=(SHAPES | TILED).keys())
def test_chunks_give_what_the_recurrence_gives(shape: tuple[int, ...]) -> None:
    exact = with_gradients(ssd_reference, inputs(shape))
    assert_near(with_gradients(ssd_chunked, inputs(shape), shape[-1]), exact, 1e-11)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 40), share=st.integers(1, 3), groups=st.integers(1, 3), state=st.integers(1, 6),
    chunk=st.integers(1, 24),
)  # fmt: skip
def test_chunks_of_any_size(tokens: int, share: int, groups: int, state: int, chunk: int) -> None:
    shape = (2, tokens, share * groups, 3, groups, state, chunk)
    tensors = inputs(shape)
    torch.testing.assert_close(ssd_chunked(*tensors, chunk), ssd_reference(*tensors), rtol=1e-10, atol=1e-10)


def test_fp32_stays_close_to_the_exact_result() -> None:
    shape = SHAPES["one group"]
    exact = with_gradients(ssd_reference, inputs(shape))
    rounded = inputs(shape, torch.float32)
    assert_near(with_gradients(ssd_chunked, rounded, shape[-1]), exact, 1e-5)
    assert_near(with_gradients(ssd_reference, rounded), exact, 1e-5)


def test_bf16_loses_no_more_than_its_inputs_do() -> None:
    shape = SHAPES["one group"]
    x, dt, a, b, c, d = inputs(shape, torch.float32)
    x, b, c = x.bfloat16(), b.bfloat16(), c.bfloat16()
    exact = ssd_reference(*(one.double() for one in (x, dt, a, b, c, d)))
    y = ssd_chunked(x, dt, a, b, c, d, shape[-1])
    assert y.dtype == torch.bfloat16
    assert (y - exact).abs().max() / exact.abs().max() < 4e-3  # the rounding of the result alone


def test_no_decay_and_total_decay() -> None:
    """a = 0 sums up all that came before; a very negative leaves only the token itself. Neither overflows."""
    x, dt, _, b, c, d = inputs((1, 40, 2, 4, 1, 4, 16))
    for rate in (0.0, -1e4):
        a = torch.full((2,), rate, dtype=torch.float64)
        exact = with_gradients(ssd_reference, [x, dt, a, b, c, d])
        ours = with_gradients(ssd_chunked, [x, dt, a, b, c, d], 16)
        assert all(one.isfinite().all() for one in ours)
        assert_near(ours, exact, 1e-11)


def test_on_a_cpu_the_chunked_form_is_taken() -> None:
    tensors = inputs(SHAPES["one group"])
    assert torch.equal(ssd(*tensors, 16), ssd_chunked(*tensors, 16))


@pytest.mark.parametrize("shape", (SHAPES | TILED).values(), ids=(SHAPES | TILED).keys())
def test_kernels_give_what_the_recurrence_gives(shape: tuple[int, ...], device: torch.device) -> None:
    exact = with_gradients(ssd_reference, inputs(shape))
    tensors = [one.to(device) for one in inputs(shape, torch.float32)]
    assert_near(with_gradients(ssd_triton, tensors, shape[-1]), exact, 5e-5)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 40), groups=st.integers(1, 2), state=st.integers(1, 20), chunk=st.integers(10, 40))
def test_kernels_on_any_size(device: torch.device, tokens: int, groups: int, state: int, chunk: int) -> None:
    shape = (1, tokens, 2 * groups, 5, groups, state, chunk)
    exact = with_gradients(ssd_reference, inputs(shape))
    tensors = [one.to(device) for one in inputs(shape, torch.float32)]
    assert_near(with_gradients(ssd_triton, tensors, chunk), exact, 5e-5)


def test_kernels_in_a_narrow_format_add_up_in_fp32(device: torch.device) -> None:
    """bf16 on a GPU. Triton's interpreter multiplies its bits as whole numbers, so fp16 there."""
    narrow, tolerance = (torch.bfloat16, 1e-2) if device.type == "cuda" else (torch.float16, 1.5e-3)
    shape = (2, 40, 4, 16, 2, 16, 32)
    x, dt, a, b, c, d = (one.to(device) for one in inputs(shape, torch.float32))
    tensors = [x.to(narrow), dt, a, b.to(narrow), c.to(narrow), d]
    exact = with_gradients(ssd_reference, [one.double().cpu() for one in tensors])
    ours = with_gradients(ssd_triton, tensors, 32)
    assert [one.dtype for one in ours[1:]] == [one.dtype for one in tensors]
    for name, one, wanted in zip(NAMES, ours, exact, strict=True):
        error = ((one.cpu().double() - wanted).norm() / wanted.norm()).item()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("size", [0.0, 1e4])
def test_kernels_on_zeros_and_large_values(size: float, device: torch.device) -> None:
    shape = (1, 40, 2, 8, 1, 8, 16)
    exact = with_gradients(ssd_reference, inputs(shape, size=size))
    ours = with_gradients(ssd_triton, [one.to(device) for one in inputs(shape, torch.float32, size)], 16)
    assert_near(ours, exact, 5e-5)


@pytest.mark.parametrize("rate", [0.0, -1e4])
def test_kernels_without_decay_and_with_total_decay(rate: float, device: torch.device) -> None:
    x, dt, a, b, c, d = inputs((1, 40, 2, 8, 1, 8, 24))
    tensors = [x, dt, torch.full_like(a, rate), b, c, d]
    exact = with_gradients(ssd_reference, tensors)
    ours = with_gradients(ssd_triton, [one.float().to(device) for one in tensors], 24)
    assert all(one.isfinite().all() for one in ours)
    assert_near(ours, exact, 5e-5)


def test_kernels_read_slices_of_a_wider_tensor(device: torch.device) -> None:
    """As a mixer gives them: x, b and c side by side in one tensor; and a gradient that is one number, spread out."""
    x, dt, a, b, c, d = (one.to(device) for one in inputs((2, 20, 4, 8, 2, 8, 16), torch.float32))
    wide = torch.cat((x.flatten(2), b.flatten(2), c.flatten(2)), dim=-1)
    parts = wide.split((32, 16, 16), dim=-1)
    views = [part.unflatten(-1, (-1, 8)).detach().requires_grad_() for part in parts]
    assert not views[0].is_contiguous()
    whole = [one.detach().requires_grad_() for one in (x, b, c)]
    for got, want in zip(
        torch.autograd.grad(ssd_triton(views[0], dt, a, views[1], views[2], d, 16).sum(), views),
        torch.autograd.grad(ssd_triton(whole[0], dt, a, whole[1], whole[2], d, 16).sum(), whole),
        strict=True,
    ):
        assert torch.equal(got, want)
