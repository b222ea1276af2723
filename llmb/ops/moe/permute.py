"""Permutation of tokens into expert order and back, as autograd functions.

    row_map_NK, ends_E = sort_by_expert(topk_ids_NK, experts)      # row of each token-expert pair, end of each expert
    rows_MC = permute_tokens(x_NC, row_map_NK)                      # each token once for every expert it is routed to
    out_NC = unpermute_tokens(rows_MC, row_map_NK, topk_weights_NK, addend_NC)    # weighted sum over a token's rows

Each is one pass over memory, forward and backward (`permute_triton.py`; plain torch off the GPU): a program owns one
token, so whatever its rows share is read or written once, and no [N, K, C] tensor is materialized. Sums are accumulated
in fp32 in the order of k and rounded once, so equal inputs give equal bits. `unpermute_tokens` saves rows and weights
for the backward pass, `permute_tokens` only the row map; without weights each is the backward of the other.

A row of -1 drops a pair: it is copied nowhere and adds zero. There may be more rows than pairs, as in a padded buffer:
rows of no pair are never read, and are undefined in results and gradients.

Shapes: N tokens, K experts per token, M routed rows (N * K unless padded), E experts, C channels.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.dispatch import op
from llmb.ops.tensor_layout import at_least_fp32


@op
def sort_by_expert(topk_ids_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the row of each token-expert pair in a stable sort by expert, and the row after each expert's last.

    Both are int32 and stay on the device.
    """
    order_M = topk_ids_NK.flatten().argsort(stable=True)
    row_map_M = torch.empty_like(order_M, dtype=torch.int32)
    row_map_M[order_M] = torch.arange(len(order_M), dtype=torch.int32, device=order_M.device)
    ends_E = topk_ids_NK.flatten().bincount(minlength=experts).cumsum(0, dtype=torch.int32)
    return row_map_M.view(topk_ids_NK.shape), ends_E


@op
def permute(x_NC: Tensor, row_map_NK: Tensor, rows: int) -> Tensor:
    """Copy each token to all of its rows, [M, C]; without autograd."""
    rows_MC = x_NC.new_empty(rows + 1, x_NC.shape[1])  # the last is row -1
    rows_MC[row_map_NK.long()] = x_NC[:, None]
    return rows_MC[:-1].clone()


@op
def unpermute(rows_MC: Tensor, row_map_NK: Tensor, topk_weights_NK: Tensor | None, addend_NC: Tensor | None) -> Tensor:
    """Sum each token's rows, weighted and added to `addend` where given; without autograd."""
    gathered_NKC = at_least_fp32(_gather(rows_MC, row_map_NK))
    if topk_weights_NK is not None:
        gathered_NKC = gathered_NKC * topk_weights_NK[:, :, None]
    out_NC = gathered_NKC.sum(1)
    return (out_NC if addend_NC is None else out_NC + addend_NC).to(rows_MC.dtype)


@op
def unpermute_backward(
    dout_NC: Tensor, rows_MC: Tensor, row_map_NK: Tensor, topk_weights_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weights."""
    dout_NC = at_least_fp32(dout_NC)
    drows_MC = rows_MC.new_empty(len(rows_MC) + 1, rows_MC.shape[1])
    drows_MC[row_map_NK.long()] = (dout_NC[:, None] * topk_weights_NK[:, :, None]).to(rows_MC.dtype)
    dweights_NK = (at_least_fp32(_gather(rows_MC, row_map_NK)) * dout_NC[:, None]).sum(2)
    return drows_MC[:-1].clone(), dweights_NK.to(topk_weights_NK.dtype)


def _gather(rows_MC: Tensor, row_map_NK: Tensor) -> Tensor:
    """Return the rows of each token, [N, K, C], and zeros for -1."""
    zero_1C = rows_MC.new_zeros(1, rows_MC.shape[1])
    return torch.cat((rows_MC, zero_1C))[row_map_NK.long()]


class _PermuteTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, row_map_NK: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(row_map_NK)
        ctx.set_materialize_grads(False)
        return permute(x_NC, row_map_NK, rows), x_NC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, drows_MC: Tensor | None, dx_NC: Tensor | None) -> tuple[Tensor | None, None, None]:
        (row_map_NK,) = ctx.saved_tensors
        return dx_NC if drows_MC is None else unpermute(drows_MC, row_map_NK, None, dx_NC), None, None


class _UnpermuteTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MC: Tensor, row_map_NK: Tensor, topk_weights_NK: Tensor | None, addend_NC: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(None if topk_weights_NK is None else rows_MC, row_map_NK, topk_weights_NK)
        ctx.rows = len(rows_MC)
        return unpermute(rows_MC, row_map_NK, topk_weights_NK, addend_NC)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_NC: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor | None]:
        rows_MC, row_map_NK, topk_weights_NK = ctx.saved_tensors
        daddend_NC = dout_NC if ctx.needs_input_grad[3] else None
        if topk_weights_NK is None:
            return permute(dout_NC, row_map_NK, ctx.rows), None, None, daddend_NC
        drows_MC, dweights_NK = unpermute_backward(dout_NC, rows_MC, row_map_NK, topk_weights_NK)
        return drows_MC, None, dweights_NK, daddend_NC


def permute_tokens(x_NC: Tensor, row_map_NK: Tensor) -> Tensor:
    """Copy each token to all of its rows, [M, C], as many as pairs."""
    return permute_tokens_with_input(x_NC, row_map_NK)[0]


def permute_tokens_with_input(x_NC: Tensor, row_map_NK: Tensor, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Also return x for its other readers: their gradient is added in the backward pass of the permutation."""
    return _PermuteTokens.apply(x_NC, row_map_NK, row_map_NK.numel() if rows is None else rows)


def unpermute_tokens(
    rows_MC: Tensor,
    row_map_NK: Tensor,
    topk_weights_NK: Tensor | None = None,
    addend_NC: Tensor | None = None,
) -> Tensor:
    """Sum each token's rows in the dtype of the rows, weighted and added to `addend` where given."""
    return _UnpermuteTokens.apply(rows_MC, row_map_NK, topk_weights_NK, addend_NC)
