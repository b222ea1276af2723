"""Linear layers of frozen weights with LoRA adapters, forward and backward.

    linears = LoraLinears(model, adapters.weights(layer, frozen_weights))           # methods of `LayerLinears`
    linears.mlp_backward(adapters.grads(layer), accumulate=True, ...)

A matrix computes y = x W^T + scale * (x A^T) B^T, with an A and a B of its own for each projection stacked in it. The
adapters' output is written first and the GEMM of the frozen matrix adds to it, so that it costs no pass of its own. In
backward the frozen matrix has no gradient:

    low = scale * x A^T         d_low = scale * dy B        dB = dy^T low       dA = d_low^T x      dx = dy W + d_low A

Shapes: N tokens, K inputs, M outputs, R rank times the projections in a matrix.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmb.config.model import Model
from llmb.errors import ConfigError
from llmb.models.llama_layer.layer_collectives import TensorParallel
from llmb.models.llama_layer.layer_tensors import LayerWeights, SavedInputs
from llmb.models.llama_layer.linear_gemms import LinearGemms
from llmb.models.llama_layer.linears import PlainLinears


class AdaptedProjection(NamedTuple):
    """B of one projection and its gradient, with the projection's rows of the matrix and its rows of the stacked As."""

    rows: slice
    low: slice
    b_MR: Tensor
    db_MR: Tensor | None  # none: for forward only


class Adapter(NamedTuple):
    """Adapters of a matrix: stacked As of all its projections, their gradient, and each projection."""

    scale: float
    a_RK: Tensor
    da_RK: Tensor | None
    projections: tuple[AdaptedProjection, ...]

    def of_rows(self, first: int, end: int) -> "Adapter | None":
        """Return the adapter, for forward, of the projection with these rows of the matrix; None if it has none."""
        for projection in self.projections:
            if projection.rows == slice(first, end):
                rank = projection.b_MR.shape[1]
                alone = AdaptedProjection(slice(0, end - first), slice(0, rank), projection.b_MR, None)
                return Adapter(self.scale, self.a_RK[projection.low], None, (alone,))
        return None


class AdaptedWeight(NamedTuple):
    """A frozen matrix and its adapters, if it has any."""

    weight_MK: Tensor
    adapter: Adapter | None

    def split(self, widths: tuple[int, ...]) -> list["AdaptedWeight"]:
        """Return the projections of the matrix, as torch.split does."""
        parts, first = [], 0
        for weight in self.weight_MK.split(widths):
            end = first + len(weight)
            parts.append(AdaptedWeight(weight, None if self.adapter is None else self.adapter.of_rows(first, end)))
            first = end
        return parts


class LoraGemms(LinearGemms):
    """GEMMs of adapted weights over one chunk; see `LinearGemms`."""

    def __init__(self) -> None:
        self._d_low: tuple[Adapter, Tensor] | None = None  # between both backward GEMMs of a matrix, in any order

    def forward(  # type: ignore[override]
        self, x_NK: Tensor, weight: AdaptedWeight, out: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        weight_MK, adapter = weight
        if adapter is None:
            return super().forward(x_NK, weight_MK, out, addend)
        out_NM = x_NK.new_empty(len(x_NK), len(weight_MK)) if out is None else out
        low_NR = self._low(x_NK, adapter)
        if sum(len(projection.b_MR) for projection in adapter.projections) < len(weight_MK):
            out_NM.zero_() if addend is None else out_NM.copy_(addend)
            addend = out_NM
        for rows, low, b_MR, _ in adapter.projections:
            if addend is None:
                torch.mm(low_NR[:, low], b_MR.T, out=_columns(out_NM, rows))
            else:
                torch.addmm(_columns(addend, rows), low_NR[:, low], b_MR.T, out=_columns(out_NM, rows))
        return super().forward(x_NK, weight_MK, out_NM, addend=out_NM)

    def input_gradient(  # type: ignore[override]
        self, dy_NM: Tensor, weight: AdaptedWeight, out: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        dx_NK = super().input_gradient(dy_NM, weight.weight_MK, out, addend)
        if weight.adapter is not None:
            dx_NK.addmm_(self._take_d_low(dy_NM, weight.adapter), weight.adapter.a_RK)
        return dx_NK

    def weight_gradient(  # type: ignore[override]
        self, dy_NM: Tensor, x_NK: Tensor, dweight: Adapter | None, accumulate: bool
    ) -> None:
        """Set the gradients of a matrix's adapters, or add to them."""
        if dweight is None:
            return
        assert dweight.da_RK is not None
        low_NR = self._low(x_NK, dweight)
        for rows, low, _, db_MR in dweight.projections:
            assert db_MR is not None
            super().weight_gradient(_columns(dy_NM, rows), low_NR[:, low], db_MR, accumulate)
        super().weight_gradient(self._take_d_low(dy_NM, dweight), x_NK, dweight.da_RK, accumulate)

    def _low(self, x_NK: Tensor, adapter: Adapter) -> Tensor:
        """Return scale * x A^T."""
        return super().forward(x_NK, adapter.a_RK).mul_(adapter.scale)

    def _take_d_low(self, dy_NM: Tensor, adapter: Adapter) -> Tensor:
        """Return the gradient of x A^T: scale * dy B. The second request of a matrix is for the one just computed."""
        if self._d_low is not None and self._d_low[0] is adapter:
            (_, d_low_NR), self._d_low = self._d_low, None
            return d_low_NR
        d_low_NR = dy_NM.new_empty(len(dy_NM), len(adapter.a_RK))
        for rows, low, b_MR, _ in adapter.projections:
            torch.mm(_columns(dy_NM, rows), b_MR, out=d_low_NR[:, low])
        self._d_low = adapter, d_low_NR.mul_(adapter.scale)
        return d_low_NR


class LoraLinears(PlainLinears):
    """Linears of frozen weights with adapters, in the dtype of the residual, on one rank."""

    def __init__(
        self, model: Model, weights: LayerWeights, inputs: SavedInputs | None = None, tp: TensorParallel | None = None
    ):
        if tp is not None:
            raise ConfigError("LoRA adapters are not divided over tensor-parallel ranks; use tp=1")
        super().__init__(model, weights, inputs)
        self.gemms: Any = LoraGemms()


def _columns(x_NM: Tensor, columns: slice) -> Tensor:
    """Return some columns; all of them as the very tensor, which torch may then change in place."""
    return x_NM if columns == slice(0, x_NM.shape[1]) else x_NM[:, columns]
