"""A tensor times a number, added to one of another format or written over it."""

import pytest
import torch

from llmb.ops.loss.scaled_add import scaled_add_reference_

FORMATS = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("part_dtype", FORMATS)
@pytest.mark.parametrize("total_dtype", FORMATS)
@pytest.mark.parametrize("shape", [(1,), (3, 4099), (2, 4096)])
def test_the_kernel_and_plain_torch(
    shape: tuple[int, ...], total_dtype: torch.dtype, part_dtype: torch.dtype, fresh: bool, device: torch.device
) -> None:
    from llmb.ops.loss.scaled_add_triton import scaled_add_triton_

    generator = torch.Generator().manual_seed(3)
    total, part = (torch.randn(shape, generator=generator).to(device, dtype) for dtype in (total_dtype, part_dtype))
    if fresh:
        total.fill_(torch.nan)  # what is written over is not looked at
    wanted, scale = total.clone(), torch.tensor(0.25, device=device)
    scaled_add_triton_(total, part, scale, fresh)
    scaled_add_reference_(wanted, part, scale, fresh)
    # The interpreter cuts where a GPU rounds: one unit of the last place.
    torch.testing.assert_close(total, wanted, rtol=2**-7 if total_dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_a_tensor_may_be_scaled_where_it_lies(device: torch.device) -> None:
    from llmb.ops.loss.scaled_add_triton import scaled_add_triton_

    x = torch.arange(5000.0, device=device)
    scaled_add_triton_(x, x, torch.tensor(0.5, device=device), fresh=True)
    assert torch.equal(x, torch.arange(5000.0, device=device) / 2)


def test_large_small_and_missing_numbers(device: torch.device) -> None:
    from llmb.ops.loss.scaled_add_triton import scaled_add_triton_

    part, two = torch.tensor([1e38, -1e-38, 0.0, torch.inf, torch.nan], device=device), torch.tensor(2.0, device=device)
    total = torch.ones(5, device=device)
    scaled_add_triton_(total, part, two, fresh=False)
    torch.testing.assert_close(total.cpu(), torch.tensor([2e38, 1.0, 1.0, torch.inf, torch.nan]), equal_nan=True)
    scaled_add_triton_(torch.empty(0, device=device), torch.empty(0, device=device), two, fresh=True)
