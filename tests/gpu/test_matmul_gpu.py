"""Matmul on a GPU by cuBLASLt algorithms against the same in fp32."""

import pytest
import torch
from cuda_checks import FP8_GEMM, NEEDS_GPU, relative_error
from torch import Tensor

from llmb.ops.gemm import algorithm_trial, cublas_lt
from llmb.ops.gemm.matmul import matmul
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2

pytestmark = NEEDS_GPU

BF16 = torch.bfloat16
SIZES = [(512, 768, 1024), (2048, 4096, 6144), (1000, 520, 776), (33, 4096, 1024)]
TRANSPOSED = [(False, False), (False, True), (True, False), (True, True)]


@pytest.fixture(autouse=True)
def _all_sizes_use_cublas_lt(monkeypatch):
    monkeypatch.setattr("llmb.ops.gemm.matmul.MIN_CUBLAS_MACS", 0)


def randn(rows: int, columns: int, transposed: bool = False, dtype: torch.dtype = BF16) -> Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    x = torch.randn(shape, device="cuda").to(dtype)
    return x.T if transposed else x


def assert_close_after_rounding(actual: Tensor, left: Tensor, right: Tensor, addend: float | Tensor = 0.0) -> None:
    expected = left.float() @ right.float() + addend
    error = relative_error(actual, expected)
    assert error < (4e-3 if actual.dtype == BF16 else 2e-3), error


@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_bf16_in_any_layout(size, dtype, transposed):
    m, k, n = size
    left, right = randn(m, k, transposed[0]), randn(k, n, transposed[1])
    assert_close_after_rounding(matmul(left, right, dtype=dtype), left, right)
    addend = randn(m, n, dtype=dtype)
    for out in (torch.full_like(addend, torch.nan), addend.clone()):
        in_place = bool(out.isfinite().all())
        matmul(left, right, out=out, addend=out if in_place else addend)
        assert_close_after_rounding(out, left, right, addend)


@FP8_GEMM
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)])
def test_fp8_operands_are_dequantized_and_accumulated(formats, fast, dtype):
    left, right = randn(1024, 2048, dtype=formats[0]), randn(1536, 2048, dtype=formats[1])
    scales = torch.tensor(2.0, device="cuda"), torch.tensor(0.25, device="cuda")
    actual = matmul(left, right.T, dtype=dtype, scales=scales, fast=fast)
    assert_close_after_rounding(actual, 0.5 * left.float(), right.T)
    total = randn(1024, 1536, dtype=dtype)
    before = total.clone()
    matmul(left, right.T, out=total, addend=total, scales=scales, fast=fast)
    assert_close_after_rounding(total, 0.5 * left.float(), right.T, before)
    new_scales = (torch.tensor(4.0, device="cuda"), scales[1])  # the same kind of call with another scale
    assert_close_after_rounding(matmul(left, right.T, dtype=dtype, scales=new_scales, fast=fast), left.float(), right.T)


def test_strided_rows_and_lower_alignment():
    left, right = randn(1024, 1024), randn(1024, 1000)
    for shift in (0, 8, 4):  # 256 bytes and more, 16, and one that only torch supports
        padded = torch.full((1024, 1536), 7.0, device="cuda", dtype=BF16)
        out = padded[:, shift : shift + 1000]
        matmul(left, right, out=out)
        assert_close_after_rounding(out, left, right)
        assert bool((padded[:, :shift] == 7).all())
        assert bool((padded[:, shift + 1000 :] == 7).all())


def test_trial_runs_once_and_leaves_the_addend_alone():
    left, right, total = randn(640, 1152), randn(1152, 896), randn(640, 896)
    before = total.clone()
    matmul(left, right, out=total, addend=total)  # the first of its kind: all algorithms run, one of them counts
    assert_close_after_rounding(total, left, right, before)
    plan = cublas_lt.plan_for(left, right, total, total, None, False)
    assert plan._selected is not None
    assert cublas_lt.plan_for(left, right, total, None, None, False) is plan


def test_matmul_in_a_cuda_graph():
    left, right, out = randn(768, 1024), randn(1024, 1280), torch.empty(768, 1280, device="cuda", dtype=BF16)
    matmul(left, right, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(left, right, out=out)
    out.zero_()
    graph.replay()
    assert_close_after_rounding(out, left, right)


@pytest.mark.exclusive  # measures time
def test_fastest_candidate_is_picked():
    left, right = randn(4096, 4096), randn(4096, 4096)

    def repeated(times: int) -> bool:
        for _ in range(times):
            torch.mm(left, right)
        return True

    candidates = [lambda: repeated(3), lambda: repeated(1), lambda: repeated(2)]
    assert algorithm_trial.pick_fastest(candidates, ["three", "one", "two"]) == 1
