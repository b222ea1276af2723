"""A mixture of experts in place of the dense MLP: a router sends each token to a few of many gated MLPs.

No token is dropped. Each is copied once for every expert it visits, the copies are sorted by expert, and the experts
compute them as three grouped products. The way back is a sum over each token's copies (`llmb/ops/moe/permute.py`).

The weights of all experts are stacked along dimension 0, [E, out, in]: a split of that dimension is a split of experts,
and slice e is what Hugging Face files hold for expert e.

Shapes: N tokens, K experts a token visits, M = N * K copies, E experts, C hidden width, F an expert's width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmb.config.spec import Experts, Model
from llmb.errors import ConfigError
from llmb.models.blocks import GatedMlp
from llmb.ops.activation.activation_autograd import activated
from llmb.ops.moe.grouped_gemm import grouped_product
from llmb.ops.moe.permute import copied_beside, mixed, sorted_by_expert
from llmb.ops.moe.router import NO_WEIGHT, choose, router_scores, weigh


class _Fp32Product(torch.autograd.Function):
    """x @ weight.T in fp32 that keeps x as it came, where a wider copy would take twice its memory."""

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
    """Which experts each token visits and with what weight, in fp32 whatever the rest computes in.

    The weight is no nn.Linear, so that no pass over linear layers changes its number format. `forced_balance` is set
    from outside: tokens are then dealt to the experts in turn, whatever the scores say, and the scores still weigh.
    `over_all_tokens` may be replaced where the tokens of a micro-batch are on several ranks: it sums over those.
    """

    bias: Tensor | None

    def __init__(self, hidden: int, experts: Experts):
        super().__init__()
        self.experts = experts
        self.forced_balance = False
        self.over_all_tokens: Callable[[Tensor], Tensor] = _as_it_is
        self.balance_losses: list[Tensor] | None = None  # where each forward pass leaves its own: `balance_losses`
        self.weight = nn.Parameter(torch.empty(experts.count, hidden))
        # Corrects the choice of experts, never their weight; it is no parameter because no gradient reaches it.
        self.register_buffer("bias", torch.zeros(experts.count) if experts.score == "sigmoid" else None)

    def forward(self, x_NC: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts' weights in fp32 and their numbers, both [N, K]."""
        logits_NE = _Fp32Product.apply(x_NC, self.weight)
        scores_NE = router_scores(logits_NE, self.experts)
        with torch.no_grad():
            if self.forced_balance:
                chosen_NK = self._deal(len(x_NC), x_NC.device)
            else:
                chosen_NK = choose(scores_NE, self.bias, self.experts)
        if self.experts.aux_loss:
            loss = self._balance_loss(scores_NE, chosen_NK)
            if self.balance_losses is not None:
                self.balance_losses.append(loss)
        return weigh(scores_NE, chosen_NK, self.experts), chosen_NK

    def _deal(self, tokens: int, device: torch.device) -> Tensor:
        """Experts in turn: no two experts differ by more than one token, and no token visits one twice.

        The turn begins anew with the tokens of each call, so each rank deals its own, evenly. Several ranks deal as
        one process would where the tokens that stand together on a rank, times top_k, are a multiple of the experts.
        """
        places = torch.arange(tokens * self.experts.top_k, device=device)
        return (places % self.experts.count).view(tokens, self.experts.top_k)

    def _balance_loss(self, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """The Switch Transformer's: E * sum over experts of (share of visits * mean probability); even load gives 1."""
        chosen_M = chosen_NK.flatten()
        visits_E = scores_NE.new_zeros(self.experts.count).scatter_add_(0, chosen_M, scores_NE.new_ones(len(chosen_M)))
        probabilities_NE = scores_NE / (scores_NE.sum(dim=-1, keepdim=True) + NO_WEIGHT)
        visits_E, sums_E = self.over_all_tokens(torch.stack((visits_E, probabilities_NE.sum(dim=0))))
        visits = visits_E.sum()
        even = self.experts.count * ((visits_E / visits) @ (sums_E / (visits / self.experts.top_k)))
        return self.experts.aux_loss * even


def _as_it_is(sums: Tensor) -> Tensor:
    return sums


@contextmanager
def balance_losses(network: nn.Module) -> Iterator[list[Tensor]]:
    """Collects what the routers of a forward pass add to the loss; a recomputation outside adds nothing again."""
    losses: list[Tensor] = []
    routers = [router for router in network.modules() if isinstance(router, Router) and router.experts.aux_loss]
    for router in routers:
        router.balance_losses = losses
    try:
        yield losses
    finally:
        for router in routers:
            router.balance_losses = None


class GroupedLinear(nn.Module):
    """A linear layer with another weight for each run of rows: rows up to ends_E[0] meet weight[0], and so on.

    The one place where routed experts' weights are used, for a precision pass to replace.
    """

    def __init__(self, groups: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs))

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        return grouped_product(x_MI, self.weight, ends_E)


class ExpertMlp(nn.Module):
    """The routed experts' weighted sum, and the shared experts, which every token visits, added to it."""

    def __init__(self, model: Model):
        super().__init__()
        experts = experts_of(model)
        self.router = Router(model.hidden, experts)
        self.gate = GroupedLinear(experts.count, model.hidden, experts.ffn)
        self.up = GroupedLinear(experts.count, model.hidden, experts.ffn)
        self.down = GroupedLinear(experts.count, experts.ffn, model.hidden)
        self.activation = model.activation
        width = experts.shared * experts.ffn  # several shared experts are one that is as wide as all
        self.shared = GatedMlp(model.hidden, width, model.activation) if experts.shared else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, -2)
        weights_NK, chosen_NK = self.router(x_NC)
        places_NK, ends_E = sorted_by_expert(chosen_NK, self.router.experts.count)
        rows_MC, x_NC = copied_beside(x_NC, places_NK)
        y_MC = self.visit(rows_MC, ends_E)
        shared_NC = None if self.shared is None else self.shared(x_NC)
        return mixed(y_MC, places_NK, weights_NK, shared_NC).view_as(x_BTC)

    def visit(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        """Every expert's MLP on its own rows; where experts are on several ranks, rows travel around this call."""
        return self.down(activated(self.gate(x_MC, ends_E), self.activation, self.up(x_MC, ends_E)), ends_E)


def experts_of(model: Model) -> Experts:
    """The model's experts, or a ConfigError that says what is wrong with them."""
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
        raise ConfigError(f"model {model.name}: top_k={experts.top_k} is more than the experts of the open groups")
    return experts
