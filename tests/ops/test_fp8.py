"""8-bit linear layers: the emulation equals the plain reference to the bit, and errs no more than the formats must."""

import math

import pytest
import torch
from torch import Tensor

from llmb.ops.gemm.fp8_linear import (
    E4M3,
    E5M2,
    SMALLEST_AMAX,
    activation_in_fp8,
    cast,
    fits_fp8,
    fp8_linear,
    fp8_linear_reference,
    scale_of,
)

SHAPES = [(16, 16, 16), (64, 32, 48), (128, 256, 64), (48, 512, 1024)]  # tokens, inputs, outputs
# Half a step between neighbours, relative to the number: 2^-4 with 3 bits of mantissa, 2^-3 with 2.
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}


def operands(tokens: int, inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + inputs)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(outputs, inputs, generator=generator) * 0.02).requires_grad_()
    grad = (torch.randn(tokens, outputs, generator=generator) * 1e-6).to(dtype)
    return x, weight, grad


def results(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = fp8_linear(x, weight)
    return out, *torch.autograd.grad(out, (x, weight), grad)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_emulation_equals_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, grad = operands(*shape, dtype=dtype)
    found, wanted = results(x, weight, grad), fp8_linear_reference(x.detach(), weight.detach(), grad)
    assert [f.dtype for f in found] == [dtype, dtype, torch.float32]
    for name, ours, theirs in zip(("out", "grad of x", "grad of weight"), found, wanted, strict=True):
        assert torch.equal(ours, theirs), f"{name}: {relative_error(ours, theirs):.1e}"


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_the_error_is_that_of_rounded_operands(shape: tuple[int, int, int]) -> None:
    """Two operands, each off by at most half a step, evenly spread: a third of a step's square, summed at random."""
    x, weight, grad = operands(*shape)
    exact = (x.float() @ weight.T, grad.float() @ weight, grad.float().T @ x.float())
    bounds = [math.hypot(HALF_STEP[a], HALF_STEP[b]) for a, b in ((E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3))]
    for ours, theirs, bound in zip(results(x, weight, grad), exact, bounds, strict=True):
        assert 0.002 < relative_error(ours, theirs) < bound / math.sqrt(3)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("magnitude", [1e-36, 1e-20, 1.0, 3e4, 1e30, 1e38])
def test_each_number_is_off_by_half_a_step_at_most(dtype: torch.dtype, magnitude: float) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * magnitude
    made = cast(x, scale_of(x, dtype), dtype, rows=True, columns=True)
    if magnitude > SMALLEST_AMAX:
        assert made.rows.float().abs().max() == torch.finfo(dtype).max, "the largest magnitude uses the whole range"
    assert torch.equal(made.columns.float(), made.rows.float().T)
    back = made.rows.double() * made.scale.double()
    smallest_step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * made.scale.double()
    allowed = torch.maximum(x.double().abs() * HALF_STEP[dtype], smallest_step / 2) * (1 + 1e-6)
    assert ((back - x.double()).abs() <= allowed).all()


def test_zeros_stay_zeros() -> None:
    x, weight, grad = operands(32, 32, 32)
    for zeroed in (x, weight, grad):
        before = zeroed.detach().clone()
        zeroed.data.zero_()
        found = results(x, weight, grad)
        assert all(torch.isfinite(f).all() for f in found)
        if zeroed is not grad:
            assert (found[0] == 0).all()
        zeroed.data.copy_(before)


@pytest.mark.parametrize("factor", [1e-25, 1e-12, 1e12, 1e25])
def test_magnitude_does_not_matter(factor: float) -> None:
    """A power of two passes through the scales untouched; these factors are moved to the nearest."""
    factor = 2.0 ** round(math.log2(factor))
    x, weight, grad = operands(32, 64, 32)
    plain = results(x, weight, grad)
    scaled = results((x.detach() * factor).requires_grad_(), weight, grad)
    assert torch.equal(scaled[0], plain[0] * factor)
    assert torch.equal(scaled[1], plain[1])
    assert torch.equal(scaled[2], plain[2] * factor)


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
def test_what_is_not_a_number_is_never_clipped(lost: float, where: str) -> None:
    named = dict(zip(("x", "weight", "grad"), operands(32, 32, 32), strict=True))
    named[where].data[3, 5] = lost
    out, grad_x, grad_weight = results(**named)
    touched = {"x": (out, grad_weight), "weight": (out, grad_x), "grad": (grad_x, grad_weight)}[where]
    assert all(t.isnan().all() for t in touched)


def test_which_shapes_fit() -> None:
    assert fits_fp8(16, 32, 48)
    assert not any((fits_fp8(15, 32, 48), fits_fp8(16, 24, 48), fits_fp8(16, 32, 40), fits_fp8(0, 32, 48)))


def test_an_activation_is_cast_once_until_it_changes_or_dies() -> None:
    x = torch.randn(2, 16, 32)
    first = activation_in_fp8(x)
    assert activation_in_fp8(x) is first
    x.mul_(2)
    second = activation_in_fp8(x)
    assert second is not first
    assert second.scale == 2 * first.scale
    assert activation_in_fp8(x.clone()) is not second


def test_sequences_are_flattened() -> None:
    x, weight, _ = operands(64, 32, 16)
    assert torch.equal(fp8_linear(x.view(4, 16, 32), weight), fp8_linear(x, weight).view(4, 16, 16))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (80, 48), (64, 144)], ids=str)
def test_the_triton_cast_writes_both_layouts(
    dtype: torch.dtype, source: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    """On numbers that 8 bits hold exactly, because the rounding of Triton's interpreter is rough."""
    from llmb.ops.quant.fp8_cast_triton import cast_tiles

    values = torch.randint(-8, 8, shape, device=device).float()
    x, scale, none = (
        (4 * values).to(source),
        torch.tensor(4.0, device=device),
        torch.empty(0, dtype=dtype, device=device),
    )
    for together in (True, False):
        rows, columns = values.new_zeros(shape, dtype=dtype), values.new_zeros(shape[::-1], dtype=dtype)
        if together:
            cast_tiles(x, scale, rows, columns)
        else:
            cast_tiles(x, scale, rows, none)
            cast_tiles(x, scale, none, columns)
        assert torch.equal(rows.float(), values)
        assert torch.equal(columns.float(), values.T)
