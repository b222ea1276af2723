"""The norm in 8 bits: plain torch against the norm and a cast, the kernels against plain torch."""

import math

import pytest
import torch
from torch import Tensor

from llmb.ops.gemm.fp8_linear import cast
from llmb.ops.norm.rms_norm import rms_norm
from llmb.ops.norm.rms_norm_fp8 import rms_norm_fp8, rms_norm_fp8_reference
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import Gauge, padded

pytest.importorskip("triton")
from llmb.ops.norm.rms_norm_fp8_triton import rms_norm_fp8_triton

EPS = 1e-5
SHAPES = [(5, 12), (1, 64), (130, 70), (3, 1), (16, 1000)]


def inputs(n: int, c: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + c)
    x, weight = torch.randn(n, c, generator=generator) * size, torch.randn(c, generator=generator)
    return x.bfloat16(), weight.bfloat16()


def gauge_on(device: torch.device) -> Gauge:
    return Gauge(torch.tensor(0.011, device=device), torch.tensor(0.0, device=device))


def room(n: int, c: int, device: torch.device) -> tuple[Tensor, Tensor]:
    shapes = ((n, c), (c, padded(n)))
    return tuple(torch.full(shape, 7.0, device=device).to(E4M3) for shape in shapes)  # type: ignore[return-value]


def chosen(made: tuple[Tensor, Tensor], forms: tuple[bool, bool]) -> list[Tensor | None]:
    return [one if form else None for one, form in zip(made, forms, strict=True)]


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Where the last bits of fp32 decide the rounding, neighbours are as good; that is rare."""
    found, wanted = found.float().cpu(), wanted.float().cpu()
    near = (found - wanted).abs() <= wanted.abs() / 8 + 2**-9
    return bool(near.all()) and bool(((found != wanted).float().mean() <= 0.01).item())


def test_plain_torch_is_the_norm_and_a_cast() -> None:
    x, weight = inputs(20, 48)
    gauge, (rows, columns) = gauge_on(x.device), room(20, 48, x.device)
    rms_norm_fp8(x, weight, EPS, gauge, rows, columns)
    normed = rms_norm(x.float(), weight.float(), EPS)
    largest = (448 * gauge.scale).item()  # of some versions of torch a cast makes NaN of what is larger
    wanted = cast(normed.clamp(-largest, largest), gauge.scale, E4M3, rows=True, columns=True)
    assert torch.equal(rows.float(), wanted.rows.float())
    assert torch.equal(columns[:, :20].float(), wanted.columns.float())
    assert (columns[:, 20:].float() == 0).all()
    assert gauge.amax == normed.abs().max()


@pytest.mark.parametrize(("n", "c"), SHAPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
def test_kernels_give_what_torch_gives(n: int, c: int, size: float, device: torch.device) -> None:
    x, weight = inputs(n, c, size)
    wanted, here = room(n, c, x.device), gauge_on(x.device)
    rms_norm_fp8_reference(x, weight, EPS, here, *wanted)
    x, weight = x.to(device), weight.to(device)
    for forms in ((True, True), (True, False), (False, True), (False, False)):
        there, made = gauge_on(device), room(n, c, device)
        rms_norm_fp8_triton(x, weight, EPS, there, *chosen(made, forms))
        for one, plain, form in zip(made, wanted, forms, strict=True):
            assert alike(one, plain) if form else bool((one.float() == 7).all())
        torch.testing.assert_close(there.amax.cpu(), here.amax, rtol=1e-5, atol=0)


def test_both_forms_have_the_same_values(device: torch.device) -> None:
    x, weight = (one.to(device) for one in inputs(50, 80))
    rows, columns = room(50, 80, device)
    rms_norm_fp8_triton(x, weight, EPS, gauge_on(device), rows, columns)
    assert torch.equal(rows.float(), columns[:, :50].float().T)


def test_rows_of_the_stream_may_lie_apart(device: torch.device) -> None:
    x, weight = (one.to(device) for one in inputs(6, 24))
    wide = torch.full((6, 40), 1e9, device=device).bfloat16()
    wide[:, 8:32] = x
    for forms in (slice(0, 1), slice(0, 2)):
        wanted, found = room(6, 24, device), room(6, 24, device)
        rms_norm_fp8_triton(x, weight, EPS, gauge_on(device), *wanted[forms])
        rms_norm_fp8_triton(wide[:, 8:32], weight, EPS, gauge_on(device), *found[forms])
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.float(), other.float())


def test_what_is_not_a_number_spoils_its_token_and_shows(device: torch.device) -> None:
    x, weight = (one.to(device) for one in inputs(6, 24))
    x[2, 3] = math.nan
    for forms in ((True, False), (True, True)):
        gauge, made = gauge_on(device), room(6, 24, device)
        rms_norm_fp8_triton(x, weight, EPS, gauge, *chosen(made, forms))
        assert made[0].float().isnan().any(dim=1).tolist() == [False, False, True, False, False, False]
        assert gauge.amax.isnan()


def test_no_tokens_are_no_work(device: torch.device) -> None:
    gauge, x = gauge_on(device), torch.empty(0, 16, device=device)
    rms_norm_fp8_triton(x, torch.ones(16, device=device), EPS, gauge, *room(0, 16, device))
    assert gauge.amax == 0
