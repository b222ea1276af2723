"""Biases of queries, keys and values, and norms of each head, of a layer that has them; with their backward.

    add_bias_(bqkv_X, (q_NA, k_NW, v_NW))
    q_NA = norm_heads(q_NA, q_norm_D, eps, out=q_NA)
    norm_heads_backward_(dq_NA, q_NA, q_norm_D, eps, dq_norm_D, accumulate)

Shapes as in `layer_tensors.py`; D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmb.ops.norm.rms_norm import rms_norm, rms_norm_backward
from llmb.ops.tensor_layout import merge_columns


def add_bias_(bqkv_X: Tensor, outs: Sequence[Tensor]) -> None:
    """Add the bias to as many of queries, keys and values as there are outs, in this order."""
    first = 0
    for out in merge_columns(outs):
        out.add_(bqkv_X[first : first + out.shape[1]])
        first += out.shape[1]


def bias_backward(dqkv_NX: Tensor, dbqkv_X: Tensor, accumulate: bool) -> None:
    """Set the gradient of the bias, summed in fp32, or add to it."""
    sums_X = dqkv_NX.sum(0, dtype=torch.float32)
    dbqkv_X.add_(sums_X) if accumulate else dbqkv_X.copy_(sums_X)


def norm_heads(x_NA: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Return the normed heads; `out` may be x."""
    out_NA = torch.empty_like(x_NA) if out is None else out
    rms_norm(_rows(x_NA, weight_D), weight_D, eps, out=_rows(out_NA, weight_D))
    return out_NA


def norm_heads_backward_(
    grad_NA: Tensor, x_NA: Tensor, weight_D: Tensor, eps: float, dweight_D: Tensor | None, accumulate: bool
) -> None:
    """Turn the gradient of the normed heads, a strided view, into that of x; set that of the weight, or add to it.

    Without one the weight is frozen.
    """
    rows = _rows(grad_NA.contiguous(), weight_D)
    rms_norm_backward(rows, _rows(x_NA, weight_D), weight_D, eps, None, rows, dweight_D, accumulate)
    grad_NA.copy_(rows.view(grad_NA.shape))


def _rows(x_NA: Tensor, weight_D: Tensor) -> Tensor:
    """View contiguous memory as one row for each head of each token."""
    return x_NA.view(-1, len(weight_D))
