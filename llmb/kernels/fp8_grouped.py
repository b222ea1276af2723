"""The experts' products in 8 bits: `grouped.py` as `fp8.py` would compute it.

    y_NO = fp8_grouped_product(x_NI, weight_EOI, ends_E)      # rows of group e: y = x @ weight[e].T

One scale for all rows and one for all groups' weights, so each tensor is cast once. The rows of every group are padded
with zeros to a multiple of 16, because the weight's gradient sums over them. Then each group has its own product:
torch's grouped kernel takes no e5m2 gradients. The loop reads the groups' sizes on the host, so the device runs dry
there for a moment, and such a layer cannot be captured in a CUDA graph.

Shapes: N rows of all groups, P with padding, E groups, I inputs, O outputs.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from llmb.kernels.fp8 import E4M3, E5M2, MULTIPLE, Fp8, cast, product, rounded, scale_of
from llmb.kernels.triton_device import rehearsing


class Padded(NamedTuple):
    """Where rows go when each group is padded."""

    bounds: list[int]  # of the groups, padded: group e is rows bounds[e] to bounds[e + 1]
    places_N: Tensor  # of each row among the padded

    def spread(self, x_NI: Tensor) -> Tensor:
        """Each row in its place, zeros between."""
        padded_PI = x_NI.new_zeros(self.bounds[-1], x_NI.shape[1])
        return padded_PI.index_copy_(0, self.places_N, x_NI)

    def gather(self, padded_PO: Tensor) -> Tensor:
        """The rows without the padding."""
        return padded_PO.index_select(0, self.places_N)


def padded_groups(ends_E: Tensor, rows: int) -> Padded:
    """The layout for groups that end at these rows; waits for the device."""
    ends = even_ends(len(ends_E), rows) if rehearsing() else ends_E.tolist()
    bounds = [0]
    for start, end in pairwise([0, *ends]):
        bounds.append(bounds[-1] + -(-(end - start) // MULTIPLE) * MULTIPLE)
    shifts_E = torch.tensor(
        [to - start for to, start in zip(bounds[:-1], [0, *ends[:-1]], strict=True)], device=ends_E.device
    )
    places_N = torch.arange(rows, device=ends_E.device)
    return Padded(bounds, places_N + shifts_E[torch.searchsorted(ends_E, places_N, right=True)])


def even_ends(groups: int, rows: int) -> list[int]:
    """Where groups end that differ by no more than one row: where tensors have no values, so much is assumed."""
    return [(group + 1) * rows // groups for group in range(groups)]


_already_cast = WeakIdKeyDictionary()  # rows that are still alive -> (their version, ends_E, Padded, Fp8)


def _rows_in_fp8(x_NI: Tensor, ends_E: Tensor) -> tuple[Padded, Fp8]:
    """Padded and cast once for all layers that read the same rows, as gate and up do."""
    version, ends, layout, made = _already_cast.get(x_NI, (None, None, None, None))
    if version != x_NI._version or ends is not ends_E:
        with torch.no_grad():
            layout = padded_groups(ends_E, len(x_NI))
            made = cast(layout.spread(x_NI), scale_of(x_NI, E4M3), E4M3, rows=True, columns=True)
        _already_cast[x_NI] = (x_NI._version, ends_E, layout, made)
    return layout, made


class _Fp8GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, layout: Padded, x8: Fp8) -> Tensor:
        w8 = cast(weight_EOI.flatten(0, 1), scale_of(weight_EOI, E4M3), E4M3, rows=True)
        ctx.save_for_backward(x8.columns, x8.scale, weight_EOI, w8.scale, layout.places_N)
        ctx.bounds = layout.bounds
        scales, weights_EOI = (x8.scale, w8.scale), w8.rows.view(weight_EOI.shape)
        out_PO = x_NI.new_empty(layout.bounds[-1], weight_EOI.shape[1])
        for weight_OI, (start, end) in zip(weights_EOI, pairwise(layout.bounds), strict=True):
            if start < end:
                out_PO[start:end] = product(x8.rows[start:end], weight_OI, scales, x_NI.dtype, fast=True)
        return layout.gather(out_PO)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_columns_IP, x_scale, weight_EOI, w_scale, places_N = ctx.saved_tensors
        layout = Padded(ctx.bounds, places_N)
        g8 = cast(layout.spread(grad_NO), scale_of(grad_NO, E5M2), E5M2, rows=True, columns=True)
        outputs = weight_EOI.shape[1]
        groups = [(e, *bounds) for e, bounds in enumerate(pairwise(ctx.bounds)) if bounds[0] < bounds[1]]
        grad_x_NI = grad_weight_EOI = None
        if ctx.needs_input_grad[0]:
            w8 = cast(weight_EOI.flatten(0, 1), w_scale, E4M3, columns=True)
            grad_x_PI = grad_NO.new_empty(ctx.bounds[-1], weight_EOI.shape[2])
            for e, start, end in groups:
                weight_IO = w8.columns[:, e * outputs : (e + 1) * outputs]
                grad_x_PI[start:end] = product(g8.rows[start:end], weight_IO, (g8.scale, w_scale), grad_NO.dtype)
            grad_x_NI = layout.gather(grad_x_PI)
        if ctx.needs_input_grad[1]:
            scales = (g8.scale, x_scale)
            grad_weight_EOI = torch.zeros_like(weight_EOI)
            for e, start, end in groups:
                rows = slice(start, end)
                grad_weight_EOI[e] = product(g8.columns[:, rows], x_columns_IP[:, rows], scales, weight_EOI.dtype)
        return grad_x_NI, grad_weight_EOI, None, None


def fp8_grouped_product(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Each group's rows times its weight with 8-bit operands; inputs and outputs must be multiples of 16."""
    return _Fp8GroupedProduct.apply(x_NI, weight_EOI, *_rows_in_fp8(x_NI, ends_E))


def fp8_grouped_product_reference(
    x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, grad_NO: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output and both gradients, group by group, without padding."""
    (x, x_scale), (weight, w_scale) = rounded(x_NI, E4M3), rounded(weight_EOI, E4M3)
    grad, g_scale = rounded(grad_NO, E5M2)
    groups = [slice(start, end) for start, end in pairwise([0, *ends_E.tolist()])]
    out = torch.cat([x[rows] @ matrix.T for rows, matrix in zip(groups, weight, strict=True)]) * (x_scale * w_scale)
    grad_x = torch.cat([grad[rows] @ matrix for rows, matrix in zip(groups, weight, strict=True)])
    grad_weight = torch.stack([grad[rows].T @ x[rows] for rows in groups]) * (g_scale * x_scale)
    return out.to(x_NI.dtype), (grad_x * (g_scale * w_scale)).to(grad_NO.dtype), grad_weight.to(weight_EOI.dtype)
