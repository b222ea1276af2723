"""Matmul, on a GPU by cuBLASLt algorithms: dtypes, layouts, addends, output buffers of the caller."""

import pytest
import torch
from nightly_cases import by_turns
from seeded_tensors import relative_error
from torch import Tensor

from llmb.ops.gemm import algorithm_trial, cublas_lt
from llmb.ops.gemm.matmul import matmul
from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.fp8_quant import E5M2

BF16, FP32 = torch.bfloat16, torch.float32
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TRANSPOSED = [(False, False), (False, True), (True, False), (True, True)]
ON_GPU = [
    pytest.param(size, marks=[pytest.mark.gpu, needs_gpu])
    for size in ((512, 768, 1024), (2048, 4096, 6144), (1000, 520, 776), (33, 4096, 1024))
]


@pytest.fixture(autouse=True)
def cublas_lt_for_all_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each algorithm once, except where the choice itself is tested."""
    monkeypatch.setattr("llmb.ops.gemm.matmul.MIN_CUBLAS_MACS", 0)
    if request.node.get_closest_marker("exclusive") is None:
        for name in ("INTERLEAVED_S", "FIRST_INTERLEAVED_S", "REPEATED_S"):
            monkeypatch.setattr(algorithm_trial, name, 0.0)


@pytest.fixture
def fp8_device(device: torch.device) -> torch.device:
    """The GPU if it has fp8 GEMMs."""
    return device if device.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9) else torch.device("cpu")


def randn(rows: int, columns: int, device: torch.device, transposed: bool = False, dtype: torch.dtype = BF16) -> Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    return x.T if transposed else x


def assert_close_after_rounding(actual: Tensor, left: Tensor, right: Tensor, addend: float | Tensor = 0.0) -> None:
    exact = FP32 if actual.is_cuda else torch.float64
    expected = left.to(exact) @ right.to(exact) + addend
    bound = {BF16: 4e-3, FP32: 2e-3 if actual.is_cuda else 1e-6}[actual.dtype]
    assert relative_error(actual, expected) < bound


@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("size", [(40, 56, 24), *ON_GPU])
def test_bf16_in_any_layout(size, dtype, transposed, device):
    m, k, n = size
    left, right = randn(m, k, device, transposed[0]), randn(k, n, device, transposed[1])
    actual = matmul(left, right, dtype=dtype)
    assert (actual.dtype, matmul(left, right).dtype) == (dtype, BF16)
    assert_close_after_rounding(actual, left, right)
    addend = randn(m, n, device, dtype=dtype)
    in_place, separate = addend.clone(), torch.full_like(addend, torch.nan)
    assert matmul(left, right, out=in_place, addend=in_place) is in_place
    assert matmul(left, right, out=separate, addend=addend) is separate
    for result in (in_place, separate, matmul(left, right, addend=addend, dtype=dtype)):
        assert_close_after_rounding(result, left, right, addend)


@pytest.mark.parametrize(
    ("formats", "fast", "dtype"), by_turns(((E4M3, E4M3), (E5M2, E4M3)), (True, False), (BF16, FP32), period=4)
)
def test_fp8_operands_are_dequantized_and_accumulated(formats, fast, dtype, fp8_device):
    left, right = randn(1024, 2048, fp8_device, dtype=formats[0]), randn(1536, 2048, fp8_device, dtype=formats[1])
    scales = torch.tensor(2.0, device=fp8_device), torch.tensor(0.25, device=fp8_device)
    actual = matmul(left, right.T, dtype=dtype, scales=scales, fast=fast)
    assert_close_after_rounding(actual, 0.5 * left.float(), right.T)
    total = randn(1024, 1536, fp8_device, dtype=dtype)
    before = total.clone()
    matmul(left, right.T, out=total, addend=total, scales=scales, fast=fast)
    assert_close_after_rounding(total, 0.5 * left.float(), right.T, before)
    new_scales = (torch.tensor(4.0, device=fp8_device), scales[1])  # the same kind of call with another scale
    assert_close_after_rounding(matmul(left, right.T, dtype=dtype, scales=new_scales, fast=fast), left.float(), right.T)


def test_strided_rows_and_lower_alignment(device):
    left, right = randn(1024, 1024, device), randn(1024, 1000, device)
    for shift in (0, 8, 4):  # 256 bytes and more, 16, and one that only torch supports
        padded = torch.full((1024, 1536), 7.0, device=device, dtype=BF16)
        out = padded[:, shift : shift + 1000]
        matmul(left, right, out=out)
        assert_close_after_rounding(out, left, right)
        assert bool((padded[:, :shift] == 7).all())
        assert bool((padded[:, shift + 1000 :] == 7).all())


@pytest.mark.gpu
@needs_gpu
def test_trial_runs_once_and_leaves_the_addend_alone(device):
    left, right, total = randn(640, 1152, device), randn(1152, 896, device), randn(640, 896, device)
    before = total.clone()
    matmul(left, right, out=total, addend=total)  # the first of its kind: all algorithms run, one of them counts
    assert_close_after_rounding(total, left, right, before)
    plan = cublas_lt.plan_for(left, right, total, total, None, False)
    assert plan._selected is not None
    assert cublas_lt.plan_for(left, right, total, None, None, False) is plan


@pytest.mark.gpu
@needs_gpu
def test_matmul_in_a_cuda_graph(device):
    left, right, out = randn(768, 1024, device), randn(1024, 1280, device), randn(768, 1280, device)
    matmul(left, right, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(left, right, out=out)
    out.zero_()
    graph.replay()
    assert_close_after_rounding(out, left, right)
