"""Scaled add: dtypes, aliasing and special values of the kernel."""

import pytest
import torch

from llmb.ops.loss.scaled_add import scaled_add_

pytest.importorskip("triton")

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("total_dtype", DTYPES)
def test_all_dtypes(total_dtype: torch.dtype, x_dtype: torch.dtype, accumulate: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    total, x = (torch.randn(3, 4099, generator=generator).to(device, dtype) for dtype in (total_dtype, x_dtype))
    if not accumulate:
        total.fill_(torch.nan)  # must not be read
    expected, scale = total.clone(), torch.tensor(0.25, device=device)
    scaled_add_.triton(total, x, scale, accumulate)
    scaled_add_.reference(expected, x, scale, accumulate)
    # The interpreter truncates where a GPU rounds: one unit of the last place.
    torch.testing.assert_close(total, expected, rtol=2**-7 if total_dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_total_may_be_x(device: torch.device) -> None:
    x = torch.arange(5000.0, device=device)
    scaled_add_.triton(x, x, torch.tensor(0.5, device=device), accumulate=False)
    assert torch.equal(x, torch.arange(5000.0, device=device) / 2)


def test_special_values_and_empty_tensors(device: torch.device) -> None:
    x, two = torch.tensor([1e38, -1e-38, 0.0, torch.inf, torch.nan], device=device), torch.tensor(2.0, device=device)
    total = torch.ones(5, device=device)
    scaled_add_.triton(total, x, two, accumulate=True)
    torch.testing.assert_close(total.cpu(), torch.tensor([2e38, 1.0, 1.0, torch.inf, torch.nan]), equal_nan=True)
    scaled_add_.triton(torch.empty(0, device=device), torch.empty(0, device=device), two, accumulate=False)


def test_autograd_notices_the_write(device: torch.device) -> None:
    total = torch.ones(4, device=device)
    version = total._version
    scaled_add_.triton(total, total.clone(), torch.tensor(1.0, device=device), accumulate=True)
    assert total._version > version
