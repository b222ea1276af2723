"""GEMM by cuBLASLt through ctypes, with the algorithm that is fastest on this device.

    plan = plan_for(left, right, out, addend, scales, fast)
    plan(left, right, out, addend, scales)                          # out = addend + left @ right

torch takes the first algorithm that the cuBLASLt heuristic returns, which is meant for a chip at its full clock. On a
power-limited one others are up to 8 % faster: on an H200 a later result won for nearly every GEMM of Llama 8b. Here all
heuristic results of a kind of call are tried on its first use (`algorithm_trial.py`): some ten seconds of a run's first
step. None gets a workspace, which would have to be cleared before each GEMM. cuBLASLt also takes an addend (C) other
than the output, and one beside fp8 operands; torch first copies the former and does not offer the latter.

cuBLAS is column-major: to it, our matrices are their transposes, and the right one comes first.
"""

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.device_capabilities import capabilities
from llmb.ops.gemm.algorithm_trial import pick_fastest
from llmb.ops.quant.activation_quant import E4M3

TYPES = {torch.float32: 0, torch.bfloat16: 14, E4M3: 28, torch.float8_e5m2: 29}
COMPUTE_FP32, FP32 = 68, 0
TRANSPOSES, SCALES, FAST_ACCUM = (3, 4), (17, 18), 25  # of a matmul descriptor, for the first and second matrix
ALIGNMENTS = 5, 6, 7, 8  # of a preference: for A, B, C, D
# Attributes of an algorithm: id, tile, split-K, variant, stages, cluster.
ALGORITHM_ATTRIBUTES = {0: c_uint32, 1: c_uint32, 2: c_uint32, 5: c_uint32, 6: c_uint32, 8: c_uint16}
ALIGNMENT, MIN_ALIGNMENT = 256, 16  # bytes
MAX_RESULTS = 16
ZERO, ONE = c_float(0), c_float(1)

Scales = tuple[Tensor, Tensor]


class _HeuristicResult(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Matrix(NamedTuple):
    """Shape and memory layout of a matrix."""

    rows: int
    columns: int
    column_major: bool
    leading_dim: int
    dtype: torch.dtype

    def layout(self, library: ctypes.CDLL) -> c_void_p:
        """Create the layout descriptor of the transpose."""
        rows, columns = (self.rows, self.columns) if self.column_major else (self.columns, self.rows)
        layout = c_void_p()
        _check(library.cublasLtMatrixLayoutCreate(byref(layout), TYPES[self.dtype], c_uint64(rows), c_uint64(columns),
                                                  c_int64(self.leading_dim)))  # fmt: skip
        return layout


def supports(*tensors: Tensor) -> bool:
    """Return whether cuBLASLt takes matrices of these dtypes, strides and alignments."""
    return all(
        x.dtype in TYPES
        and 1 in x.stride()
        and max(x.stride()) * x.element_size() % MIN_ALIGNMENT == 0
        and x.data_ptr() % MIN_ALIGNMENT == 0
        for x in tensors
    )


class MatmulPlan:
    """Descriptors and selected algorithm of one kind of GEMM."""

    def __init__(
        self,
        left: _Matrix,
        right: _Matrix,
        out: _Matrix,
        addend: _Matrix | None,
        scaled: bool,
        fast: bool,
        alignment: int,
    ):
        self._library, self._handle = _cublas()
        self._descriptor = c_void_p()
        _check(self._library.cublasLtMatmulDescCreate(byref(self._descriptor), COMPUTE_FP32, FP32))
        for attribute, matrix in zip(TRANSPOSES, (right, left), strict=True):
            self._set(attribute, c_int32(matrix.column_major))
        if scaled:
            self._set(FAST_ACCUM, c_int8(fast))
        self._fast = fast
        self._layouts = [matrix.layout(self._library) for matrix in (right, left, addend or out, out)]
        self._results = self._heuristic_results(alignment)
        self._selected: int | None = None

    def __call__(self, left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None, scales: Scales | None) -> None:
        if scales is not None:
            for attribute, scale in zip(SCALES, reversed(scales), strict=True):
                self._set(attribute, c_void_p(scale.data_ptr()))
        if self._selected is None and not capabilities(out.device).has("gemm_trial"):
            self._selected = 0  # the same in every process, which trials are not
        if self._selected is None and not torch.cuda.is_current_stream_capturing():
            in_place = addend is not None and addend.data_ptr() == out.data_ptr()
            scratch = torch.empty_like(out) if in_place else out
            candidates = [partial(self._try, result, left, right, scratch, addend) for result in self._results]
            kernels = [(left.element_size(), self._fast, *self._attributes(result)) for result in self._results]
            self._selected = pick_fastest(candidates, kernels)
        _check(self._launch(self._results[self._selected or 0], left, right, out, addend))

    def _heuristic_results(self, alignment: int) -> list[_HeuristicResult]:
        preference = c_void_p()
        _check(self._library.cublasLtMatmulPreferenceCreate(byref(preference)))
        value = c_int32(alignment)
        for attribute in ALIGNMENTS:
            _check(self._library.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, byref(value), c_size_t(ctypes.sizeof(value))))  # fmt: skip
        results, count = (_HeuristicResult * MAX_RESULTS)(), c_int()
        _check(self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._descriptor, *self._layouts, preference, MAX_RESULTS, results,
            byref(count)))  # fmt: skip
        _check(self._library.cublasLtMatmulPreferenceDestroy(preference))
        return [result for result in results[: count.value] if result.status == 0]

    def _attributes(self, result: _HeuristicResult) -> Iterator[int]:
        """Yield the attributes of an algorithm that identify its kernel."""
        for attribute, kind in ALGORITHM_ATTRIBUTES.items():
            value, written = kind(), c_size_t()
            size = c_size_t(ctypes.sizeof(value))
            _check(self._library.cublasLtMatmulAlgoConfigGetAttribute(
                byref(result.algorithm), attribute, byref(value), size, byref(written)))  # fmt: skip
            yield value.value

    def _try(self, result: _HeuristicResult, left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None) -> bool:
        return self._launch(result, left, right, out, addend) == 0

    def _launch(self, result: _HeuristicResult, left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None) -> int:
        stream = torch.cuda.current_stream(out.device).cuda_stream
        return int(self._library.cublasLtMatmul(
            self._handle, self._descriptor, byref(ONE), c_void_p(right.data_ptr()), self._layouts[0],
            c_void_p(left.data_ptr()), self._layouts[1], byref(ZERO if addend is None else ONE),
            c_void_p((out if addend is None else addend).data_ptr()), self._layouts[2], c_void_p(out.data_ptr()),
            self._layouts[3], byref(result.algorithm), None, c_size_t(0), c_void_p(stream),
        ))  # fmt: skip

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check(self._library.cublasLtMatmulDescSetAttribute(self._descriptor, attribute, byref(value), size))


def plan_for(
    left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None, scales: Scales | None, fast: bool
) -> MatmulPlan:
    """Return the cached plan for this kind of GEMM; `addend` may be `out`, fp8 matrices have scales."""
    tensors = [left, right, out, *([] if addend is None else [addend])]
    alignment = ALIGNMENT if all(x.data_ptr() % ALIGNMENT == 0 for x in tensors) else MIN_ALIGNMENT
    matrices = [_layout_of(x) for x in tensors]
    # An addend like the output makes no other kind: a gradient is written first, then accumulated.
    if len(matrices) == 4 and matrices[3] == matrices[2]:
        matrices.pop()
    return _cached_plan(out.device, alignment, scales is not None, fast, *matrices)


@cache
def _cached_plan(
    _device: torch.device, alignment: int, scaled: bool, fast: bool, left: _Matrix, right: _Matrix, out: _Matrix,
    addend: _Matrix | None = None,
) -> MatmulPlan:  # fmt: skip
    return MatmulPlan(left, right, out, addend, scaled, fast, alignment)


def _layout_of(x: Tensor) -> _Matrix:
    (rows, columns), column_major = x.shape, x.stride(1) != 1
    return _Matrix(rows, columns, column_major, x.stride(int(column_major)), x.dtype)


@cache
def _cublas() -> tuple[ctypes.CDLL, c_void_p]:
    """Return the library that torch has loaded, and a handle of our own."""
    assert torch.version.cuda is not None, "cuBLAS comes with CUDA"
    library, handle = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"), c_void_p()
    _check(library.cublasLtCreate(byref(handle)))
    return library, handle


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"cuBLASLt refused a GEMM with status {status}")
