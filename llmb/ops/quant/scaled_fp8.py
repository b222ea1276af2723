"""A matrix in fp8 with several scales: per row of each layout, per 128 values, or per block of 128 x 128."""

from typing import NamedTuple

from torch import Tensor


class ScaledFp8(NamedTuple):
    """A matrix [N, K] in e4m3 in the layouts that GEMMs take; one that was not requested is empty, and so its scales.

    Scales are [n, G] of a layout [n, k] whose rows are cut into G groups, one with a scale per row. Those of blocks are
    [n / 128, G], with G padded to a multiple of 4.
    """

    rows: Tensor  # [N, K], contiguous
    row_scales: Tensor  # fp32
    columns: Tensor  # [K, P], contiguous: the transpose, padded with zeros
    column_scales: Tensor  # fp32

    def with_layouts(self, rows: bool, columns: bool) -> "ScaledFp8":
        """Return it with the requested layouts alone."""
        requested = (rows, rows, columns, columns)
        return ScaledFp8(*(x if keep else x.new_empty(0) for x, keep in zip(self, requested, strict=True)))

    def split_rows(self, widths: tuple[int, ...]) -> list["ScaledFp8"]:
        """Return the row-wise layout of consecutive rows; blocks are not divided."""
        per_scale = len(self.rows) // len(self.row_scales)
        scales = self.row_scales.split([width // per_scale for width in widths])
        return [
            self._replace(rows=rows, row_scales=row_scales)
            for rows, row_scales in zip(self.rows.split(widths), scales, strict=True)
        ]
