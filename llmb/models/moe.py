"""Mixture of experts (MoE): a router sends each token to a few of many gated MLPs.

Dropless. Tokens are permuted into expert order, one row per token-expert pair, the experts are three grouped GEMMs, and
the rows are combined to a weighted sum per token (`llmb/ops/moe/permute.py`).

The weights of all experts are stacked along dimension 0, [E, out, in]: a shard of that dimension is a set of experts,
and slice e is the tensor of expert e in Hugging Face files.

Shapes: N tokens, K experts per token, M = N * K routed rows, E experts, C hidden width, F an expert's width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmb.config.model import Model, MoEConfig
from llmb.errors import ConfigError
from llmb.models.blocks import GatedMlp
from llmb.ops.activation.activation_autograd import fused_activation
from llmb.ops.moe.grouped_gemm import add_group_bias, grouped_gemm
from llmb.ops.moe.permute import permute_tokens_with_input, sort_by_expert, unpermute_tokens
from llmb.ops.moe.router import WEIGHT_SUM_EPS, router_scores, routing_weights, select_experts


class _Fp32Linear(torch.autograd.Function):
    """x @ weight.T in fp32 that saves x in its own dtype instead of an fp32 copy."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_EC: Tensor) -> Tensor:
        ctx.save_for_backward(x_NC, weight_EC)
        return F.linear(x_NC.float(), weight_EC.float())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor, Tensor]:
        x_NC, weight_EC = ctx.saved_tensors
        return (grad_NE @ weight_EC.float()).to(x_NC.dtype), (grad_NE.T @ x_NC.float()).to(weight_EC.dtype)


class Router(nn.Module):
    """Top-k router, always in fp32.

    The weight is no nn.Linear, so that precision policies for linear layers leave it alone. With `force_load_balance`
    tokens go to the experts round-robin whatever their scores, which still give the weights. Parallelism replaces
    `sum_over_ranks`, which sums over the ranks that share the tokens of a micro-batch.
    """

    bias: Tensor | None

    def __init__(self, hidden: int, experts: MoEConfig):
        super().__init__()
        self.experts = experts
        self.force_load_balance = False
        self.sum_over_ranks: Callable[[Tensor], Tensor] = _identity
        self.aux_losses: list[Tensor] | None = None  # filled by forward passes inside `collect_aux_losses`
        self.weight = nn.Parameter(torch.empty(experts.count, hidden))
        # Corrects the selection of experts, not their weights; a buffer, because it has no gradient.
        self.register_buffer("bias", torch.zeros(experts.count) if experts.has_correction_bias else None)
        self.logit_bias = nn.Parameter(torch.zeros(experts.count)) if experts.bias else None

    def forward(self, x_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights in fp32 and the numbers of the selected experts, both [N, K]."""
        logits_NE = _Fp32Linear.apply(x_NC, self.weight)
        if self.logit_bias is not None:
            logits_NE = logits_NE + self.logit_bias.float()
        scores_NE = router_scores(logits_NE, self.experts)
        with torch.no_grad():
            if self.force_load_balance:
                topk_ids_NK = self._round_robin(len(x_NC), x_NC.device)
            else:
                topk_ids_NK = select_experts(scores_NE, self.bias, self.experts)
        if self.experts.aux_loss:
            loss = self._load_balance_loss(scores_NE, topk_ids_NK)
            if self.aux_losses is not None:
                self.aux_losses.append(loss)
        return routing_weights(scores_NE, topk_ids_NK, self.experts), topk_ids_NK

    def _round_robin(self, tokens: int, device: torch.device) -> Tensor:
        """Assign experts round-robin: loads differ by at most one token, and no token has an expert twice.

        It starts anew in each call, so each rank balances its own tokens. Several ranks assign as one process would if
        the consecutive tokens on a rank, times top_k, are a multiple of the experts.
        """
        pairs = torch.arange(tokens * self.experts.top_k, device=device)
        return (pairs % self.experts.count).view(tokens, self.experts.top_k)

    def _load_balance_loss(self, scores_NE: Tensor, topk_ids_NK: Tensor) -> Tensor:
        """Return the Switch Transformer's loss: E * sum over experts of (fraction of tokens * mean probability)."""
        topk_ids_M = topk_ids_NK.flatten()
        tokens_E = scores_NE.new_zeros(self.experts.count).scatter_add_(
            0, topk_ids_M, scores_NE.new_ones(len(topk_ids_M))
        )
        probabilities_NE = scores_NE / (scores_NE.sum(dim=-1, keepdim=True) + WEIGHT_SUM_EPS)
        tokens_E, probability_sums_E = self.sum_over_ranks(torch.stack((tokens_E, probabilities_NE.sum(dim=0))))
        total_tokens = tokens_E.sum()
        balance = self.experts.count * (
            (tokens_E / total_tokens) @ (probability_sums_E / (total_tokens / self.experts.top_k))
        )
        return self.experts.aux_loss * balance


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def collect_aux_losses(network: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the auxiliary losses of the routers in a forward pass; recomputation outside of it adds nothing."""
    losses: list[Tensor] = []
    routers = [router for router in network.modules() if isinstance(router, Router) and router.experts.aux_loss]
    for router in routers:
        router.aux_losses = losses
    try:
        yield losses
    finally:
        for router in routers:
            router.aux_losses = None


class GroupedLinear(nn.Module):
    """Linear layer with one weight per group of rows: rows up to ends_E[0] take weight[0], and so on.

    Precision policies replace `matmul`.
    """

    def __init__(self, groups: int, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(groups, outputs)) if bias else None

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        y_MO = self.matmul(x_MI, ends_E)
        return y_MO if self.bias is None else add_group_bias(y_MO, self.bias, ends_E)

    def matmul(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """Multiply rows by their weights."""
        return grouped_gemm(x_MI, self.weight, ends_E)


class MoE(nn.Module):
    """Weighted sum of the routed experts plus the shared experts of all tokens."""

    def __init__(self, model: Model):
        super().__init__()
        experts = moe_config(model)
        self.router = Router(model.hidden, experts)
        self.gate = GroupedLinear(experts.count, model.hidden, experts.ffn, experts.bias)
        self.up = GroupedLinear(experts.count, model.hidden, experts.ffn, experts.bias)
        self.down = GroupedLinear(experts.count, experts.ffn, model.hidden, experts.bias)
        self.activation = model.activation
        width = experts.shared * experts.ffn  # several shared experts are one wide MLP
        self.shared = GatedMlp(model.hidden, width, model.activation) if experts.shared else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, -2)
        topk_weights_NK, topk_ids_NK = self.router(x_NC)
        row_map_NK, ends_E, rows = self.assign_rows(topk_ids_NK)
        rows_MC, x_NC = permute_tokens_with_input(x_NC, row_map_NK, rows)
        y_MC = self.run_experts(rows_MC, ends_E)
        shared_NC = None if self.shared is None else self.shared(x_NC)
        return unpermute_tokens(y_MC, row_map_NK, topk_weights_NK, shared_NC).view_as(x_BTC)

    def assign_rows(self, topk_ids_NK: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the row of each routed token, sorted by expert, the row after each expert's last, and all rows.

        Expert parallelism replaces this and wraps `run_experts` in all-to-alls.
        """
        return *sort_by_expert(topk_ids_NK, self.router.experts.count), topk_ids_NK.numel()

    def run_experts(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        """Run every expert's MLP on its rows."""
        return self.down(fused_activation(self.gate(x_MC, ends_E), self.activation, self.up(x_MC, ends_E)), ends_E)


def moe_config(model: Model) -> MoEConfig:
    """Return the validated MoE settings of a model, or raise a ConfigError."""
    experts = model.experts
    if experts is None:
        raise ConfigError(f"model {model.name}: a {model.architecture} needs the field experts")
    if not 1 <= experts.top_k <= experts.count:
        raise ConfigError(f"model {model.name}: top_k={experts.top_k} must be 1 to {experts.count}, the experts")
    if experts.count % experts.groups or not 1 <= experts.top_groups <= experts.groups:
        raise ConfigError(
            f"model {model.name}: {experts.count} experts cannot be chosen from "
            f"top_groups={experts.top_groups} of groups={experts.groups} equal groups"
        )
    if experts.top_k > experts.count // experts.groups * experts.top_groups:
        raise ConfigError(f"model {model.name}: top_k={experts.top_k} is more than the experts in top_groups")
    return experts
