"""The GPU's cast to 8 bits: a matrix is read once and written in one or both layouts.

Imported only where it runs, since Triton is not installed with torch for the CPU. `fp8.cast` does the same elsewhere.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE = 64


@triton.jit
def _cast_tile(x_ptr, scale_ptr, rows_ptr, columns_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               TILE: tl.constexpr):  # fmt: skip
    tiles_across = tl.cdiv(N, TILE)
    m = (tl.program_id(0) // tiles_across * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    n = (tl.program_id(0) % tiles_across * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    inside = (m < M) & (n < N)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(scale_ptr))
    values = tl.load(x_ptr + m * N + n, mask=inside, other=0.0).to(tl.float32) * inverse
    if ROWS:
        tl.store(rows_ptr + m * N + n, values.to(rows_ptr.dtype.element_ty), mask=inside)
    if COLUMNS:
        tl.store(columns_ptr + n * M + m, values.to(columns_ptr.dtype.element_ty), mask=inside)


def cast_tiles(x_MN: Tensor, scale: Tensor, rows_MN: Tensor, columns_NM: Tensor) -> None:
    """Write x / scale into `rows` and, transposed, into `columns`; one that is empty is left out."""
    m, n = x_MN.shape
    tiles = triton.cdiv(m, TILE) * triton.cdiv(n, TILE)
    layouts = {"ROWS": rows_MN.numel() > 0, "COLUMNS": columns_NM.numel() > 0}
    _cast_tile[(tiles,)](x_MN, scale, rows_MN, columns_NM, m, n, **layouts, TILE=TILE)
