"""8-bit matrices in both forms: plain torch against the definition, the kernel against plain torch to the bit."""

import math

import pytest
import torch
from torch import Tensor

from llmb.ops.gemm.fp8_linear import E5M2, cast, scale_of
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import Gauge, cast_both, cast_both_reference, in_both_forms, padded

pytest.importorskip("triton")
from llmb.ops.quant.fp8_quant_triton import cast_both_triton

SHAPES = [(128, 64), (130, 70), (16, 200), (5, 3), (1, 1), (257, 16)]  # tokens, channels: whole tiles and parts of them


def drawn(n: int, k: int, size: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * size).to(dtype)


def gauge_of(scale: float, device: torch.device, amax: float = 0.0) -> Gauge:
    return Gauge(torch.tensor(scale, device=device), torch.tensor(amax, device=device))


def room(n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns, full of what must not stay."""
    shapes = ((n, k), (k, padded(n)))
    return tuple(torch.full(shape, 7.0, device=device).to(dtype) for shape in shapes)  # type: ignore[return-value]


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_with_its_own_scale_a_matrix_is_what_a_cast_gives(dtype: torch.dtype, size: float) -> None:
    x = drawn(20, 12, size)
    scale = scale_of(x, dtype)
    wanted = cast(x, scale, dtype, rows=True, columns=True)
    gauge = Gauge(scale, torch.tensor(0.0))
    rows, columns = room(20, 12, dtype, x.device)
    cast_both(x, gauge, rows, columns)
    assert same(rows, wanted.rows)
    assert same(columns[:, :20].contiguous(), wanted.columns)
    assert (columns[:, 20:].float() == 0).all()
    assert columns.shape == (12, 32)
    assert gauge.amax == x.abs().max()
    made = in_both_forms(x, dtype)
    assert same(made.rows, rows)
    assert same(made.columns, columns)
    assert made.scale == scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e4, 1e30])
def test_the_kernel_gives_what_torch_gives(
    n: int, k: int, size: float, dtype: torch.dtype, device: torch.device
) -> None:
    x = drawn(n, k, size)
    wanted, found = room(n, k, dtype, x.device), room(n, k, dtype, device)
    there, here = gauge_of(0.37, device), gauge_of(0.37, x.device)
    cast_both_reference(x, here, *wanted)
    cast_both_triton(x.to(device), there, *found)
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])
    assert there.amax.item() == here.amax.item() == x.abs().max().item()


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
def test_either_form_alone_or_none(source: torch.dtype, device: torch.device) -> None:
    x = drawn(40, 24, dtype=source).to(device)
    both, apart = room(40, 24, E4M3, device), room(40, 24, E4M3, device)
    cast_both_triton(x, gauge_of(0.01, device), *both)
    cast_both_triton(x, gauge_of(0.01, device), apart[0], None)
    cast_both_triton(x, gauge_of(0.01, device), None, apart[1])
    assert same(apart[0], both[0])
    assert same(apart[1], both[1])
    for call in (cast_both_triton, cast_both_reference):
        only = gauge_of(0.01, device)
        call(x, only)
        assert only.amax == x.float().abs().max()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_what_is_too_large_is_clamped_and_seen(dtype: torch.dtype, device: torch.device) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -2 * largest, 3e38, -math.inf]] * 5, device=device)
    for call in (cast_both_triton, cast_both_reference):
        rows, columns = room(5, 4, dtype, device)
        gauge = gauge_of(1.0, device)
        call(x, gauge, rows, columns)
        assert rows[0].float().tolist() == [largest, -largest, largest, -largest]
        assert columns[:, 4].float().tolist() == rows[0].float().tolist()
        assert gauge.amax.item() == math.inf


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_what_is_not_a_number_stays_so_and_is_above_all(dtype: torch.dtype, device: torch.device) -> None:
    x = drawn(6, 5).to(device)
    x[1, 3], x[2, 2] = math.nan, math.inf
    for call in (cast_both_triton, cast_both_reference):
        rows, columns = room(6, 5, dtype, device)
        gauge = gauge_of(1.0, device)
        call(x, gauge, rows, columns)
        assert rows.float().isnan().nonzero().tolist() == [[1, 3]]
        assert columns.float().isnan().nonzero().tolist() == [[3, 1]]
        assert gauge.amax.isnan()


def test_amax_remembers_what_was_larger(device: torch.device) -> None:
    for call in (cast_both_triton, cast_both_reference):
        gauge = gauge_of(1.0, device, amax=3.0)
        for x, wanted in ((2.0, 3.0), (-5.0, 5.0), (4.0, 5.0)):
            call(torch.full((3, 3), x, device=device), gauge)
            assert gauge.amax.item() == wanted


def test_rows_may_lie_apart_and_nothing_between_them_is_touched(device: torch.device) -> None:
    x = drawn(6, 24).to(device)
    wide_x, wide_rows = torch.full((6, 40), 1e9, device=device).bfloat16(), room(6, 40, E4M3, device)[0]
    wide_x[:, 8:32] = x
    wanted, columns = room(6, 24, E4M3, device), room(6, 24, E4M3, device)[1]
    cast_both_triton(x, gauge_of(0.02, device), *wanted)
    gauge = gauge_of(0.02, device)
    cast_both_triton(wide_x[:, 8:32], gauge, wide_rows[:, 8:32], columns)
    assert same(wide_rows[:, 8:32].contiguous(), wanted[0])
    assert same(columns, wanted[1])
    assert gauge.amax == x.abs().max()
    assert (wide_rows[:, :8].float() == 7).all()
    assert (wide_rows[:, 32:].float() == 7).all()


def test_no_tokens_are_no_work(device: torch.device) -> None:
    for call in (cast_both_triton, cast_both_reference):
        gauge = gauge_of(1.0, device, amax=2.0)
        call(torch.empty(0, 16, device=device), gauge, *room(0, 16, E4M3, device))
        assert gauge.amax.item() == 2.0


def test_columns_are_as_wide_as_products_want_them(device: torch.device) -> None:
    assert [padded(tokens) for tokens in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
    x = drawn(17, 16).to(device)
    for width in (17, 16, 48):
        with pytest.raises(AssertionError, match="padded"):
            cast_both_triton(x, gauge_of(1.0, device), None, torch.empty(16, width, device=device).to(E4M3))
