"""The GPU's cast to 8 bits: a matrix is written in one or both layouts, and read from memory once.

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
    m = (tl.program_id(0) // tiles_across * TILE + tl.arange(0, TILE)).to(tl.int64)
    n = (tl.program_id(0) % tiles_across * TILE + tl.arange(0, TILE)).to(tl.int64)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(scale_ptr))
    # The tile is read once for each layout, the second time from the cache, which takes no longer: where one read feeds
    # both stores, Triton 3.6 scrambles the transposed one of an fp32 source.
    if ROWS:
        down, along = m[:, None], n[None, :]
        inside = (down < M) & (along < N)
        values = tl.load(x_ptr + down * N + along, mask=inside, other=0.0).to(tl.float32) * inverse
        tl.store(rows_ptr + down * N + along, values.to(rows_ptr.dtype.element_ty), mask=inside)
    if COLUMNS:
        down, along = n[:, None], m[None, :]
        inside = (down < N) & (along < M)
        values = tl.load(x_ptr + along * N + down, mask=inside, other=0.0).to(tl.float32) * inverse
        tl.store(columns_ptr + down * M + along, values.to(columns_ptr.dtype.element_ty), mask=inside)


def cast_tiles(x_MN: Tensor, scale: Tensor, rows_MN: Tensor, columns_NM: Tensor) -> None:
    """Write x / scale into `rows` and, transposed, into `columns`; one that is empty is left out."""
    m, n = x_MN.shape
    tiles = triton.cdiv(m, TILE) * triton.cdiv(n, TILE)
    layouts = {"ROWS": rows_MN.numel() > 0, "COLUMNS": columns_NM.numel() > 0}
    _cast_tile[(tiles,)](x_MN, scale, rows_MN, columns_NM, m, n, **layouts, TILE=TILE)
