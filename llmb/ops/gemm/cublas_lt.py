"""Matrix products by cuBLAS, each by that of its algorithms which is fastest on this device; by way of ctypes.

    planned(left, right, out, onto, scales, fast)(left, right, out, onto, scales)      # out = onto + left @ right

torch takes the first algorithm that cuBLAS proposes, which is meant for a chip at its full clock. One that is short of
power runs others up to 8 % faster: on an H200 one of the later proposals won for nearly every product of Llama 8b.
Here all proposals for a kind of call are tried when it is first made (`algorithm_trial.py`): some ten seconds of a run's first
step. None gets memory of its own, which would have to be cleared before each product. cuBLAS also adds what lies
elsewhere, and to what 8-bit operands give; torch first copies the one and does not offer the other.

cuBLAS counts matrices by columns: to it, ours are their transposes, and the right one comes first.
"""

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.gemm.algorithm_trial import fastest
from llmb.ops.quant.activation_quant import E4M3

TYPES = {torch.float32: 0, torch.bfloat16: 14, E4M3: 28, torch.float8_e5m2: 29}
COMPUTE_FP32, FP32 = 68, 0
TRANSPOSES, SCALES, FAST = (3, 4), (17, 18), 25  # attributes of a product, for the first and second matrix
ALIGNMENTS = 5, 6, 7, 8  # attributes of what is asked for: of both matrices, what is added, the result
# Attributes of an algorithm: which it is, its tile, into how many parts it cuts sums, variant, stages, cluster.
CONFIGURED = {0: c_uint32, 1: c_uint32, 2: c_uint32, 5: c_uint32, 6: c_uint32, 8: c_uint16}
ALIGNED, LEAST_ALIGNED = 256, 16  # bytes
PROPOSALS = 16
ZERO, ONE = c_float(0), c_float(1)

Scales = tuple[Tensor, Tensor]


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Matrix(NamedTuple):
    """How one lies in memory, rows beside one another or columns."""

    rows: int
    columns: int
    by_columns: bool
    apart: int  # numbers from one to the next
    dtype: torch.dtype

    def layout(self, library: ctypes.CDLL) -> c_void_p:
        """As cuBLAS sees it."""
        height, width = (self.rows, self.columns) if self.by_columns else (self.columns, self.rows)
        made = c_void_p()
        _check(library.cublasLtMatrixLayoutCreate(byref(made), TYPES[self.dtype], c_uint64(height), c_uint64(width),
                                                  c_int64(self.apart)))  # fmt: skip
        return made


def takes(*tensors: Tensor) -> bool:
    """Whether cuBLAS takes matrices that lie like this, in these formats."""
    return all(
        x.dtype in TYPES
        and 1 in x.stride()
        and max(x.stride()) * x.element_size() % LEAST_ALIGNED == 0
        and x.data_ptr() % LEAST_ALIGNED == 0
        for x in tensors
    )


class Planned:
    """One kind of call: what cuBLAS wants to know of it, and the algorithm that was chosen."""

    def __init__(
        self, left: _Matrix, right: _Matrix, out: _Matrix, onto: _Matrix | None, scaled: bool, fast: bool, aligned: int
    ):
        self._library, self._handle = _cublas()
        self._product = c_void_p()
        _check(self._library.cublasLtMatmulDescCreate(byref(self._product), COMPUTE_FP32, FP32))
        for attribute, matrix in zip(TRANSPOSES, (right, left), strict=True):
            self._set(attribute, c_int32(matrix.by_columns))
        if scaled:
            self._set(FAST, c_int8(fast))
        self._fast = fast
        self._layouts = [matrix.layout(self._library) for matrix in (right, left, onto or out, out)]
        self._proposals = self._proposed(aligned)
        self._chosen: int | None = None

    def __call__(self, left: Tensor, right: Tensor, out: Tensor, onto: Tensor | None, scales: Scales | None) -> None:
        if scales is not None:
            for attribute, scale in zip(SCALES, reversed(scales), strict=True):
                self._set(attribute, c_void_p(scale.data_ptr()))
        if self._chosen is None and not torch.cuda.is_current_stream_capturing():
            aside = torch.empty_like(out) if onto is not None and onto.data_ptr() == out.data_ptr() else out
            ways = [partial(self._try, proposal, left, right, aside, onto) for proposal in self._proposals]
            kernels = [(left.element_size(), self._fast, *self._attributes(one)) for one in self._proposals]
            self._chosen = fastest(ways, kernels)
        _check(self._launch(self._proposals[self._chosen or 0], left, right, out, onto))

    def _proposed(self, aligned: int) -> list[_Proposal]:
        wish = c_void_p()
        _check(self._library.cublasLtMatmulPreferenceCreate(byref(wish)))
        value = c_int32(aligned)
        for attribute in ALIGNMENTS:
            _check(self._library.cublasLtMatmulPreferenceSetAttribute(
                wish, attribute, byref(value), c_size_t(ctypes.sizeof(value))))  # fmt: skip
        found, count = (_Proposal * PROPOSALS)(), c_int()
        _check(self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._product, *self._layouts, wish, PROPOSALS, found, byref(count)))  # fmt: skip
        _check(self._library.cublasLtMatmulPreferenceDestroy(wish))
        return [proposal for proposal in found[: count.value] if proposal.status == 0]

    def _attributes(self, proposal: _Proposal) -> Iterator[int]:
        """Of an algorithm: they say which kernel it is."""
        for attribute, kind in CONFIGURED.items():
            value, written = kind(), c_size_t()
            size = c_size_t(ctypes.sizeof(value))
            _check(self._library.cublasLtMatmulAlgoConfigGetAttribute(
                byref(proposal.algorithm), attribute, byref(value), size, byref(written)))  # fmt: skip
            yield value.value

    def _try(self, proposal: _Proposal, left: Tensor, right: Tensor, out: Tensor, onto: Tensor | None) -> bool:
        return self._launch(proposal, left, right, out, onto) == 0

    def _launch(self, proposal: _Proposal, left: Tensor, right: Tensor, out: Tensor, onto: Tensor | None) -> int:
        stream = torch.cuda.current_stream(out.device).cuda_stream
        return int(self._library.cublasLtMatmul(
            self._handle, self._product, byref(ONE), c_void_p(right.data_ptr()), self._layouts[0],
            c_void_p(left.data_ptr()), self._layouts[1], byref(ZERO if onto is None else ONE),
            c_void_p((out if onto is None else onto).data_ptr()), self._layouts[2], c_void_p(out.data_ptr()),
            self._layouts[3], byref(proposal.algorithm), None, c_size_t(0), c_void_p(stream),
        ))  # fmt: skip

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check(self._library.cublasLtMatmulDescSetAttribute(self._product, attribute, byref(value), size))


def planned(
    left: Tensor, right: Tensor, out: Tensor, onto: Tensor | None, scales: Scales | None, fast: bool
) -> Planned:
    """For all calls of this kind; `onto` may be `out`, 8-bit matrices have scales."""
    tensors = [left, right, out, *([] if onto is None else [onto])]
    aligned = ALIGNED if all(x.data_ptr() % ALIGNED == 0 for x in tensors) else LEAST_ALIGNED
    kinds = [_matrix(x) for x in tensors]
    # Whether something is added makes no other kind: a gradient begins as what is written, then it is added to.
    if len(kinds) == 4 and kinds[3] == kinds[2]:
        kinds.pop()
    return _planned(out.device, aligned, scales is not None, fast, *kinds)


@cache
def _planned(
    _device: torch.device, aligned: int, scaled: bool, fast: bool, left: _Matrix, right: _Matrix, out: _Matrix,
    onto: _Matrix | None = None,
) -> Planned:  # fmt: skip
    return Planned(left, right, out, onto, scaled, fast, aligned)


def _matrix(x: Tensor) -> _Matrix:
    (rows, columns), by_columns = x.shape, x.stride(1) != 1
    return _Matrix(rows, columns, by_columns, x.stride(int(by_columns)), x.dtype)


@cache
def _cublas() -> tuple[ctypes.CDLL, c_void_p]:
    """The library that torch itself has loaded, and a handle of ours."""
    assert torch.version.cuda is not None, "cuBLAS comes with CUDA"
    library, handle = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"), c_void_p()
    _check(library.cublasLtCreate(byref(handle)))
    return library, handle


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"cuBLASLt refused a matrix product with status {status}")
