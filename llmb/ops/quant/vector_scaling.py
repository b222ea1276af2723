"""fp8 recipes with many scales per tensor, from the values at each use: there is no state from step to step.

    scales = RowwiseScaling(reductions)                 # or BlockwiseScaling
    x8 = scales.empty(*x_NK.shape, device, rows=True, columns=True)
    scales.quantize_(x_NK, x8)                          # a ScaledFp8

`rowwise` has one scale for each row of a GEMM's operand along the dimension that it sums: of x @ weight.T per token and
per output, of dy @ weight per token and per input, of dy.T @ x per output and per input. `blockwise` is DeepSeek-V3's:
activations and gradients in groups of 128 along the sum, weights in blocks of 128 x 128.

All operands are e4m3: with so many scales gradients do not need the range of e5m2 (`group_quant.py`).

Ranks that share a row get its scale in one process by an all-reduce of amaxes (`RankReductions`). Groups of 128 are
never shared: a configuration whose shards would cut one is refused.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.ops.quant.activation_quant import E4M3
from llmb.ops.quant.blockwise_quant import empty_blockwise, quantize_blockwise_
from llmb.ops.quant.delayed_scaling import ReduceMax
from llmb.ops.quant.fp8_quant import padded_tokens
from llmb.ops.quant.group_quant import AmaxReductions, quantize_rowwise_
from llmb.ops.quant.scaled_fp8 import ScaledFp8
from llmb.ops.tensor_layout import dense_rows


class RankReductions(NamedTuple):
    """Maxima over ranks that share a tensor; None: this rank has the dimension whole."""

    channels: ReduceMax | None = None  # or outputs of a weight
    tokens: ReduceMax | None = None


class VectorScaling:
    """Common part of both recipes: they have no state."""

    def __init__(self, reductions: RankReductions | None = None):
        self.reductions = reductions or RankReductions()

    def empty(
        self, n: int, k: int, device: torch.device, *, rows: bool = False, columns: bool = False, weight: bool = False
    ) -> ScaledFp8:
        """Allocate the requested layouts of a matrix and their scales."""
        raise NotImplementedError

    def quantize_(
        self, x_NK: Tensor, out: ScaledFp8, reductions: AmaxReductions = (None, None), weight: bool = False
    ) -> None:
        """Quantize a matrix to the layouts of `out`; `reductions` are those of amaxes of rows and of columns."""
        raise NotImplementedError

    def update(self) -> None:
        """End a step, which leaves no state."""

    def restart_step(self) -> None:
        """Begin a step again, which has left no state."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Ignore the state of a run with delayed scaling."""


class RowwiseScaling(VectorScaling):
    """One scale per row of each layout."""

    def empty(
        self, n: int, k: int, device: torch.device, *, rows: bool = False, columns: bool = False, weight: bool = False
    ) -> ScaledFp8:
        return ScaledFp8(
            torch.empty((n, k) if rows else 0, dtype=E4M3, device=device),
            torch.empty((n, 1) if rows else 0, device=device),
            torch.empty((k, padded_tokens(n)) if columns else 0, dtype=E4M3, device=device),
            torch.empty((k, 1) if columns else 0, device=device),
        )

    def quantize_(
        self, x_NK: Tensor, out: ScaledFp8, reductions: AmaxReductions = (None, None), weight: bool = False
    ) -> None:
        quantize_rowwise_(x_NK, out, reductions)


class BlockwiseScaling(VectorScaling):
    """One scale per 128 values of a row of each layout; of a weight per block of 128 x 128."""

    def empty(
        self, n: int, k: int, device: torch.device, *, rows: bool = False, columns: bool = False, weight: bool = False
    ) -> ScaledFp8:
        return empty_blockwise(n, k, device, rows=rows, columns=columns, square=weight)

    def quantize_(
        self, x_NK: Tensor, out: ScaledFp8, reductions: AmaxReductions = (None, None), weight: bool = False
    ) -> None:
        quantize_blockwise_(dense_rows(x_NK), out, weight)


VECTOR_SCALINGS: dict[str, type[VectorScaling]] = {  # by fp8_recipe of a run
    "rowwise": RowwiseScaling,
    "blockwise": BlockwiseScaling,
}
