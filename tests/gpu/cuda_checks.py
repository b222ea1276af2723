"""Random tensors on the GPU, errors of results, peak memory, and a check that the host never waits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from llmb.ops.device_capabilities import capabilities

GPU = torch.device("cuda", 0)
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def needs_capability(major: int, minor: int) -> pytest.MarkDecorator:
    has = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (major, minor)
    return pytest.mark.skipif(not has, reason=f"no GPU of compute capability {major}.{minor}")


HOPPER, FP8_GEMM = needs_capability(9, 0), needs_capability(8, 9)
NEEDS_FLASH4 = pytest.mark.skipif(
    not (torch.cuda.is_available() and capabilities(GPU).supports("flash_attention_4")),
    reason="flash-attn-4 is not installed, or no Hopper GPU",
)
NEEDS_FP8_GEMM = [pytest.mark.gpu, FP8_GEMM]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to that of the expected tensor, on whichever device either is."""
    rounded, exact = ((x.float() if x.element_size() == 1 else x).detach().to(GPU).double() for x in (actual, expected))
    return ((rounded - exact).norm() / exact.norm()).item()


def peak_allocated(call: Callable[[], object]) -> int:
    """Return the bytes that a call allocates at its peak."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Fail on any synchronization of host and device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
