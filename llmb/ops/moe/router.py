"""Top-k expert selection of a mixture-of-experts router, with grouped top-k and score correction.

    topk_weights_NK, topk_ids_NK = route(logits_NE, bias_E, experts, slot_mapping_N)

A bias corrects the scores for the selection alone; experts may be restricted to the best groups first. Training takes
the three steps one by one, since gradients flow through the scores; serving takes them in one kernel. There, a token
with a negative slot is padding of the step: it is routed to NO_EXPERT, and no expert weights are read for it.

Shapes: N tokens, E experts, G groups of experts, K experts per token.
"""

from typing import Protocol

import torch
from torch import Tensor

from llmb.ops.dispatch import op

NO_EXPERT = -1
WEIGHT_SUM_EPS = 1e-20  # avoids a division by zero for a token whose scores all round to zero


class RoutingRule(Protocol):
    """Settings of a router, as in `model.MoEConfig`."""

    @property
    def top_k(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def score(self) -> str: ...
    @property
    def renormalise(self) -> bool: ...
    @property
    def scale(self) -> float: ...


def router_scores(logits_NE: Tensor, rule: RoutingRule) -> Tensor:
    """Apply the router's score function."""
    return logits_NE.sigmoid() if rule.score == "sigmoid" else logits_NE.softmax(dim=-1)


def select_experts(scores_NE: Tensor, bias_E: Tensor | None, rule: RoutingRule) -> Tensor:
    """Return the experts with the highest corrected scores, from the groups with the best sums of two, [N, K]."""
    corrected_NE = scores_NE if bias_E is None else scores_NE + bias_E
    if rule.groups > 1:
        corrected_NGE = corrected_NE.unflatten(1, (rule.groups, -1))
        group_scores_NG = corrected_NGE.topk(min(2, corrected_NGE.shape[-1]), dim=-1).values.sum(dim=-1)
        best_NG = group_scores_NG.topk(rule.top_groups, dim=-1, sorted=False).indices
        masked_NG = torch.ones_like(group_scores_NG, dtype=torch.bool).scatter_(1, best_NG, False)
        corrected_NE = corrected_NGE.masked_fill(masked_NG[:, :, None], float("-inf")).flatten(1)
    return corrected_NE.topk(rule.top_k, dim=-1, sorted=False).indices


def routing_weights(scores_NE: Tensor, topk_ids_NK: Tensor, rule: RoutingRule) -> Tensor:
    """Return the weights of the selected experts' outputs: their scores without the correction."""
    topk_weights_NK = scores_NE.gather(1, topk_ids_NK)
    if rule.renormalise:
        topk_weights_NK = topk_weights_NK / (topk_weights_NK.sum(dim=-1, keepdim=True) + WEIGHT_SUM_EPS)
    return topk_weights_NK * rule.scale


def _has_tokens(logits_NE: Tensor, *_arguments: object, **_named: object) -> bool:
    return len(logits_NE) > 0


@op(when=_has_tokens)
def route(
    logits_NE: Tensor, bias_E: Tensor | None, rule: RoutingRule, slot_mapping_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights in fp32 and the numbers of the selected experts, both [N, K] in no particular order of K."""
    scores_NE = router_scores(logits_NE, rule)
    topk_ids_NK = select_experts(scores_NE, bias_E, rule)
    topk_weights_NK = routing_weights(scores_NE, topk_ids_NK, rule)
    if slot_mapping_N is not None:
        topk_ids_NK = topk_ids_NK.masked_fill(slot_mapping_N[:, None] < 0, NO_EXPERT)
    return topk_weights_NK, topk_ids_NK
