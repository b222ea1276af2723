"""Grouped GEMM against a loop over groups, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

import llmb.ops.moe.grouped_gemm as grouped_gemm_module
from llmb.ops.moe.grouped_gemm import grouped_gemm, grouped_gemm_reference

SIZES = {
    "uneven": [3, 9, 1, 7],
    "empty groups": [0, 13, 0, 0, 7, 0],
    "all in the last group": [0, 0, 20],
    "one group": [20],
    "many rows": [300, 1, 77, 2048, 513],
    "256 small groups": [n % 7 for n in range(256)],
}


def ends_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def actual_and_expected(
    sizes: list[int], dtype: torch.dtype, inputs: int, outputs: int, device: torch.device
) -> tuple[list, list]:
    """Return output and gradients of x and weight, in the dtype and by a loop in fp32 on the same numbers."""
    generator, ends = torch.Generator().manual_seed(1), ends_of(sizes).to(device)
    x = torch.randn(sum(sizes), inputs, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(len(sizes), outputs, inputs, generator=generator).to(device, dtype).float().requires_grad_()
    grad = torch.randn(sum(sizes), outputs, generator=generator).to(device, dtype)
    out = grouped_gemm(x, weight, ends)
    x_fp32 = x.detach().float().requires_grad_()
    expected_out = grouped_gemm_reference(x_fp32, weight, ends)
    actual = [out, *torch.autograd.grad(out, (x, weight), grad)]
    return actual, [expected_out, *torch.autograd.grad(expected_out, (x_fp32, weight), grad.float())]


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2**-8, 2e-2)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 24), (13, 5)], ids=["aligned", "odd"])
def test_results_match_a_loop_and_are_rounded_once(
    sizes: list[int], inputs: int, outputs: int, dtype: torch.dtype, rtol: float, atol: float, device: torch.device
) -> None:
    results, expected = actual_and_expected(sizes, dtype, inputs, outputs, device)
    assert [actual.dtype for actual in results] == [dtype, dtype, torch.float32]  # the last as the master weight
    for actual, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(actual.float(), exact, rtol=rtol, atol=atol)
    assert results[2].any(dim=(1, 2)).tolist() == [size > 0 for size in sizes]


@pytest.mark.parametrize(
    ("dtype", "inputs", "gemms"), [(torch.bfloat16, 16, 3), (torch.bfloat16, 13, 0), (torch.float32, 16, 0)]
)
def test_which_gemms_use_grouped_mm(
    monkeypatch, dtype: torch.dtype, inputs: int, gemms: int, device: torch.device
) -> None:
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return F.grouped_mm(*arguments, **options)

    monkeypatch.setattr(grouped_gemm_module, "F", type("Counted", (), {"grouped_mm": staticmethod(counted)}))
    actual_and_expected([5, 15], dtype, inputs, 8, device)
    assert len(calls) == gemms


def test_no_rows_at_all() -> None:
    x = torch.zeros(0, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(3, 8, 16, requires_grad=True)
    y = grouped_gemm(x, weight, ends_of([0, 0, 0]))
    assert y.shape == (0, 8)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize(("dtype", "inputs"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 13)])
def test_padding_after_the_last_group_is_ignored(dtype: torch.dtype, inputs: int) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(3, 8, inputs, generator=generator, requires_grad=True)
    x, grad = torch.randn(20, inputs, generator=generator).to(dtype), torch.randn(20, 8, generator=generator).to(dtype)

    def results(padding: int) -> list[torch.Tensor]:
        nan = torch.full((padding, 1), torch.nan, dtype=dtype)
        x_padded = torch.cat((x, nan.expand(-1, inputs))).requires_grad_()
        y = grouped_gemm(x_padded, weight, ends_of([13, 0, 7]))
        assert len(y) == 20 + padding
        return [y[:20], *torch.autograd.grad(y, (x_padded, weight), torch.cat((grad, nan.expand(-1, 8))))]

    (y, dx, dw), (padded_y, padded_dx, padded_dw) = results(0), results(12)
    assert torch.equal(padded_y, y)
    assert torch.equal(padded_dx[:20], dx)
    assert torch.equal(padded_dw, dw)
