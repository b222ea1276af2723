"""Fused MoE: gated MLPs of many experts, each token through the few its router selected; weighted sums, [N, C].

    y_NC = fused_moe(x, Routing(topk_weights_NK, topk_ids_NK, experts=256), gate_up, down, "silu", torch.bfloat16)

This rank may hold only some of the experts, from `first_expert` on: pairs of the others add nothing here. Nothing is
read on the host and every shape follows from N, so a step can be captured in a CUDA graph; a token's expert outputs are
added in the order of k, so equal inputs give equal bits.

Shapes: N tokens, K experts per token, M = N * K token-expert pairs, P those of one expert, C hidden width, F an
expert's width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmb.ops.activation.activation import gated_activation
from llmb.ops.dispatch import op
from llmb.ops.moe.expert_weights import ExpertWeights, dequantize_expert
from llmb.ops.quant.activation_quant import Activation, dequantize


class Routing(NamedTuple):
    """Output of a router; experts are numbered over all ranks."""

    topk_weights_NK: Tensor  # fp32
    topk_ids_NK: Tensor  # int64; a number of no expert is skipped
    experts: int  # of all ranks
    first_expert: int = 0  # of this rank


@op
def fused_moe(
    x: Activation, routing: Routing, gate_up: ExpertWeights, down: ExpertWeights, activation: str, dtype: torch.dtype
) -> Tensor:
    """Sum the outputs of this rank's experts for every token; the outputs of `gate_up` are gate, then up.

    A bias is added to the outputs of an expert before they are weighted. The reference goes expert by expert and reads
    on the host which tokens are routed where.
    """
    x_NC, (tokens, top_k) = dequantize(x, torch.float32), routing.topk_ids_NK.shape
    outputs_MC = torch.zeros(tokens * top_k, x_NC.shape[1], dtype=dtype, device=x_NC.device)
    for expert in range(len(gate_up.values)):
        pairs_P = (routing.topk_ids_NK.flatten() == routing.first_expert + expert).nonzero().squeeze(-1)
        gate_up_P2F = _linear(x_NC[pairs_P // top_k], gate_up, expert).to(dtype)
        hidden_PF = dequantize(gated_activation.reference(gate_up_P2F, activation, down.quant_format), torch.float32)
        output_PC = _linear(hidden_PF, down, expert)
        outputs_MC[pairs_P] = (output_PC * routing.topk_weights_NK.flatten()[pairs_P, None]).to(dtype)
    return outputs_MC.unflatten(0, (tokens, top_k)).sum(dim=1, dtype=torch.float32).to(dtype)


def _linear(x_PI: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    bias_O = None if weights.bias is None else weights.bias[expert].float()
    return F.linear(x_PI, dequantize_expert(weights, expert), bias_O)
