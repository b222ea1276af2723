"""Gated MLPs of many experts, each token through the few that its router chose: weighted sums, [N, C].

    y_NC = routed_mlp(x, Visits(weights_NK, chosen_NK, experts=256), both, down, "silu", torch.bfloat16)

A visit is one token at one expert. This rank may have only some of the experts, `first` on: visits to the others add
nothing here. Nothing is read on the host and every shape follows from N, so a step can be captured in a CUDA graph; a
token's visits are added in their own order, so equal inputs give equal bits.

Shapes: N tokens, K visits a token, M = N * K visits, V those to one expert, C hidden width, F an expert's width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.activation.gated_act import gated_reference
from llmb.ops.dispatch import takes_triton
from llmb.ops.moe.expert_weights import Stacked, plain_matrix
from llmb.ops.quant.activation_quant import Activation, as_plain


class Visits(NamedTuple):
    """Where each token goes and what comes of it; experts are counted over all ranks."""

    weights_NK: Tensor  # fp32
    chosen_NK: Tensor  # int64; what is no expert's number is a visit to nobody
    experts: int  # of all ranks
    first: int = 0  # the first of this rank


def routed_mlp_reference(
    x: Activation, visits: Visits, both: Stacked, down: Stacked, activation: str, dtype: torch.dtype
) -> Tensor:
    """Expert by expert in plain torch; reads on the host who visits whom."""
    x_NC, (tokens, top_k) = as_plain(x, torch.float32), visits.chosen_NK.shape
    answers_MC = torch.zeros(tokens * top_k, x_NC.shape[1], dtype=dtype, device=x_NC.device)
    for expert in range(len(both.values)):
        here_V = (visits.chosen_NK.flatten() == visits.first + expert).nonzero().squeeze(-1)
        both_V2F = F.linear(x_NC[here_V // top_k], plain_matrix(both, expert)).to(dtype)
        hidden_VF = as_plain(gated_reference(both_V2F, activation, down.form), torch.float32)
        answer_VC = F.linear(hidden_VF, plain_matrix(down, expert))
        answers_MC[here_V] = (answer_VC * visits.weights_NK.flatten()[here_V, None]).to(dtype)
    return answers_MC.unflatten(0, (tokens, top_k)).sum(dim=1, dtype=torch.float32).to(dtype)


def routed_mlp(
    x: Activation, visits: Visits, both: Stacked, down: Stacked, activation: str, dtype: torch.dtype
) -> Tensor:
    """Every token's visits to this rank's experts, added up. `both` has gate's outputs first, then up's."""
    if takes_triton(visits.chosen_NK):
        from llmb.ops.moe.fused_moe_triton import routed_mlp_triton

        return routed_mlp_triton(x, visits, both, down, activation, dtype)
    return routed_mlp_reference(x, visits, both, down, activation, dtype)
