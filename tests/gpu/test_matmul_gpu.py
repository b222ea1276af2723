"""The product of training on a GPU, by cuBLAS's own algorithms, beside the same in fp32."""

import pytest
import torch
from torch import Tensor

from llmb.ops.gemm import algorithm_trial, cublas_lt
from llmb.ops.gemm.fp8_linear import E4M3, E5M2
from llmb.ops.gemm.matmul import multiply

pytestmark = pytest.mark.gpu

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no products of 8 bits"
)
BF16 = torch.bfloat16
SIZES = [(512, 768, 1024), (2048, 4096, 6144), (1000, 520, 776), (33, 4096, 1024)]
TURNED = [(False, False), (False, True), (True, False), (True, True)]


@pytest.fixture(autouse=True)
def _all_sizes_are_worth_trying(monkeypatch):
    monkeypatch.setattr("llmb.ops.gemm.matmul.WORTH_TRYING", 0)
    for name in ("TRIED_S", "RESTED_S", "ALONE_S"):
        monkeypatch.setattr(algorithm_trial, name, 0.0)


def drawn(rows: int, columns: int, turned: bool = False, dtype: torch.dtype = BF16) -> Tensor:
    shape = (columns, rows) if turned else (rows, columns)
    x = torch.randn(shape, device="cuda").to(dtype)
    return x.T if turned else x


def assert_equal_as_rounded(made: Tensor, left: Tensor, right: Tensor, onto: float | Tensor = 0.0) -> None:
    wanted = left.float() @ right.float() + onto
    off = (made.float() - wanted).norm() / wanted.norm()
    assert off < (4e-3 if made.dtype == BF16 else 2e-3), off


@pytest.mark.parametrize("turned", TURNED)
@pytest.mark.parametrize("wide", [BF16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_bf16_in_any_layout(size, wide, turned):
    m, k, n = size
    left, right = drawn(m, k, turned[0]), drawn(k, n, turned[1])
    assert_equal_as_rounded(multiply(left, right, dtype=wide), left, right)
    onto = drawn(m, n, dtype=wide)
    for out in (torch.full_like(onto, torch.nan), onto.clone()):
        here = bool(out.isfinite().all())
        multiply(left, right, out=out, onto=out if here else onto)
        assert_equal_as_rounded(out, left, right, onto)


@HOPPER
@pytest.mark.parametrize("wide", [BF16, torch.float32])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)])
def test_8_bits_are_scaled_and_added(formats, fast, wide):
    left, right = drawn(1024, 2048, dtype=formats[0]), drawn(1536, 2048, dtype=formats[1])
    scales = torch.tensor(2.0, device="cuda"), torch.tensor(0.25, device="cuda")
    made = multiply(left, right.T, dtype=wide, scales=scales, fast=fast)
    assert_equal_as_rounded(made, 0.5 * left.float(), right.T)
    total = drawn(1024, 1536, dtype=wide)
    before = total.clone()
    multiply(left, right.T, out=total, onto=total, scales=scales, fast=fast)
    assert_equal_as_rounded(total, 0.5 * left.float(), right.T, before)
    other = (torch.tensor(4.0, device="cuda"), scales[1])  # the same kind of call with another scale
    assert_equal_as_rounded(multiply(left, right.T, dtype=wide, scales=other, fast=fast), left.float(), right.T)


def test_rows_apart_and_memory_that_is_less_aligned():
    left, right = drawn(1024, 1024), drawn(1024, 1000)
    for shift in (0, 8, 4):  # 256 bytes and more, 16, and what only torch takes
        wide = torch.full((1024, 1536), 7.0, device="cuda", dtype=BF16)
        out = wide[:, shift : shift + 1000]
        multiply(left, right, out=out)
        assert_equal_as_rounded(out, left, right)
        assert bool((wide[:, :shift] == 7).all())
        assert bool((wide[:, shift + 1000 :] == 7).all())


def test_proposals_are_tried_once_and_what_is_there_is_not_touched():
    left, right, total = drawn(640, 1152), drawn(1152, 896), drawn(640, 896)
    before = total.clone()
    multiply(left, right, out=total, onto=total)  # the first of its kind: all proposals run, one of them counts
    assert_equal_as_rounded(total, left, right, before)
    plan = cublas_lt.planned(left, right, total, total, None, False)
    assert plan._chosen is not None
    assert cublas_lt.planned(left, right, total, None, None, False) is plan


def test_a_graph_has_it_too():
    left, right, out = drawn(768, 1024), drawn(1024, 1280), torch.empty(768, 1280, device="cuda", dtype=BF16)
    multiply(left, right, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(left, right, out=out)
    out.zero_()
    graph.replay()
    assert_equal_as_rounded(out, left, right)


def test_the_fastest_way_is_found():
    left, right = drawn(4096, 4096), drawn(4096, 4096)

    def repeated(times: int) -> bool:
        for _ in range(times):
            torch.mm(left, right)
        return True

    ways = [lambda: repeated(3), lambda: repeated(1), lambda: repeated(2)]
    assert algorithm_trial.fastest(ways, ["three", "one", "two"]) == 1
