"""Ops at the sizes of published models, on a GPU: kernels against their references, and faster than plain torch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_cases import OpCase, all_cases
from op_cases.mamba import rows_of_nemotron_h_8b, scan_at_the_start_of_training
from op_comparison import compare_implementations

from llmb.ops.dispatch import Op
from llmb.ops.mamba.selective_state_update import selective_state_update
from llmb.ops.mamba.ssd import ssd

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("case", all_cases(full_size=True), ids=lambda case: case.id)
def test_kernel_matches_reference_at_full_size(case: OpCase, device: torch.device) -> None:
    compare_implementations(case, device)


def measure_seconds(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Return the time of a call, and of its backward if there is one."""
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]

    def call() -> None:
        out = function(*args)
        if leaves:
            torch.autograd.grad(out.float().square().sum(), leaves)

    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10e3


@pytest.mark.exclusive  # measures time
@pytest.mark.parametrize(
    ("op", "build", "params", "factor"),
    [
        (ssd, scan_at_the_start_of_training, (1, 8192, 128, 8, 128, torch.bfloat16), 4),
        (selective_state_update, rows_of_nemotron_h_8b, (torch.bfloat16,), 2),
    ],
    ids=["ssd", "selective_state_update"],
)
def test_kernels_are_faster_than_plain_torch(
    op: Op[..., Any], build: Callable[..., Any], params: tuple[Any, ...], factor: int, device: torch.device
) -> None:
    args, _ = build(torch.Generator().manual_seed(0), device, *params)
    fast, plain = (measure_seconds(function, args) for function in (op.triton, op.reference))
    print(f"{op.name}: kernels {fast:.6f} s, plain torch {plain:.6f} s")
    assert fast < plain / factor
