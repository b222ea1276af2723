"""Visits of tokens to experts as steps of autograd: rows put in the experts' order, and brought back as one sum.

    places_NK, ends_E = sorted_by_expert(chosen_NK, experts)      # the row of each visit, and where each expert's end
    rows_MC = copied(x_NC, places_NK)                             # each token once for every expert it visits
    out_NC = mixed(rows_MC, places_NK, weights_NK, beside_NC)     # beside + the weighted sum over a token's visits

Each is one pass over memory, there and back (`permute_triton.py`), plain torch off the GPU: a program has one token, so
what all its visits share is read or written once, and no tensor [N, K, C] is made on the way. Sums are in fp32 and
rounded once, in the order of the visits, so equal inputs give equal bits. `mixed` keeps its rows and weights, `copied`
nothing but places; without weights each is the other's way back.

Shapes: N tokens, K experts a token visits, M = N * K visits, E experts, C channels.
"""

from typing import Any

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton


def sorted_by_expert(chosen_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The row of each visit when they are sorted by expert, those of one in order, and the row after each expert's
    last; both int32, and never read on the host."""
    if takes_triton(chosen_NK):
        from llmb.ops.moe.permute_triton import sorted_by_expert_triton

        return sorted_by_expert_triton(chosen_NK, experts)
    return sorted_by_expert_reference(chosen_NK, experts)


def sorted_by_expert_reference(chosen_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """In plain torch."""
    order_M = chosen_NK.flatten().argsort(stable=True)
    places_M = torch.empty_like(order_M, dtype=torch.int32)
    places_M[order_M] = torch.arange(len(order_M), dtype=torch.int32, device=order_M.device)
    ends_E = chosen_NK.flatten().bincount(minlength=experts).cumsum(0, dtype=torch.int32)
    return places_M.view(chosen_NK.shape), ends_E


class _CopiedBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, places_NK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places_NK)
        ctx.set_materialize_grads(False)
        return _copied(x_NC, places_NK), x_NC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, drows_MC: Tensor | None, dx_NC: Tensor | None) -> tuple[Tensor | None, None]:
        (places_NK,) = ctx.saved_tensors
        return dx_NC if drows_MC is None else _mixed(drows_MC, places_NK, None, dx_NC), None


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MC: Tensor, places_NK: Tensor, weights_NK: Tensor | None, beside_NC: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(None if weights_NK is None else rows_MC, places_NK, weights_NK)
        return _mixed(rows_MC, places_NK, weights_NK, beside_NC)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_NC: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor | None]:
        rows_MC, places_NK, weights_NK = ctx.saved_tensors
        dbeside_NC = dout_NC if ctx.needs_input_grad[3] else None
        if weights_NK is None:
            return _copied(dout_NC, places_NK), None, None, dbeside_NC
        drows_MC, dweights_NK = _mixed_backward(dout_NC, rows_MC, places_NK, weights_NK)
        return drows_MC, None, dweights_NK, dbeside_NC


def copied(x_NC: Tensor, places_NK: Tensor) -> Tensor:
    """Each token in all of its places, [M, C]."""
    return _CopiedBeside.apply(x_NC, places_NK)[0]


def copied_beside(x_NC: Tensor, places_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and x for whoever else reads it: the slope from there is added in the copies' own way back."""
    return _CopiedBeside.apply(x_NC, places_NK)


def mixed(
    rows_MC: Tensor, places_NK: Tensor, weights_NK: Tensor | None = None, beside_NC: Tensor | None = None
) -> Tensor:
    """The sum over each token's visits, times their weights and added to `beside` where given; in the rows' format."""
    return _Mixed.apply(rows_MC, places_NK, weights_NK, beside_NC)


def _copied(x_NC: Tensor, places_NK: Tensor) -> Tensor:
    if takes_triton(x_NC):
        from llmb.ops.moe.permute_triton import copied_triton

        return copied_triton(x_NC, places_NK)
    return copied_reference(x_NC, places_NK)


def _mixed(rows_MC: Tensor, places_NK: Tensor, weights_NK: Tensor | None, beside_NC: Tensor | None) -> Tensor:
    if takes_triton(rows_MC):
        from llmb.ops.moe.permute_triton import mixed_triton

        return mixed_triton(rows_MC, places_NK, weights_NK, beside_NC)
    return mixed_reference(rows_MC, places_NK, weights_NK, beside_NC)


def _mixed_backward(dout_NC: Tensor, rows_MC: Tensor, places_NK: Tensor, weights_NK: Tensor) -> tuple[Tensor, Tensor]:
    if takes_triton(rows_MC):
        from llmb.ops.moe.permute_triton import mixed_backward_triton

        return mixed_backward_triton(dout_NC, rows_MC, places_NK, weights_NK)
    return mixed_backward_reference(dout_NC, rows_MC, places_NK, weights_NK)


def copied_reference(x_NC: Tensor, places_NK: Tensor) -> Tensor:
    """In plain torch."""
    rows_MC = x_NC.new_empty(places_NK.numel(), x_NC.shape[1])
    rows_MC[places_NK.long()] = x_NC[:, None]
    return rows_MC


def mixed_reference(rows_MC: Tensor, places_NK: Tensor, weights_NK: Tensor | None, beside_NC: Tensor | None) -> Tensor:
    """In plain torch."""
    answers_NKC = _wide(rows_MC[places_NK.long()])
    if weights_NK is not None:
        answers_NKC = answers_NKC * weights_NK[:, :, None]
    out_NC = answers_NKC.sum(1)
    return (out_NC if beside_NC is None else out_NC + beside_NC).to(rows_MC.dtype)


def mixed_backward_reference(
    dout_NC: Tensor, rows_MC: Tensor, places_NK: Tensor, weights_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """The slopes of rows and weights, in plain torch."""
    places_NK, dout_NC = places_NK.long(), _wide(dout_NC)
    drows_MC = torch.empty_like(rows_MC, memory_format=torch.contiguous_format)
    drows_MC[places_NK] = (dout_NC[:, None] * weights_NK[:, :, None]).to(rows_MC.dtype)
    dweights_NK = (_wide(rows_MC[places_NK]) * dout_NC[:, None]).sum(2)
    return drows_MC, dweights_NK.to(weights_NK.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
