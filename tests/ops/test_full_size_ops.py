"""Ops at the sizes of published models, on a GPU: kernels against their references."""

from collections.abc import Iterator

import pytest
import torch
from op_cases import OpCase, all_cases
from op_comparison import compare_implementations

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("case", all_cases(full_size=True), ids=lambda case: case.id)
def test_kernel_matches_reference_at_full_size(case: OpCase, device: torch.device) -> None:
    compare_implementations(case, device)
