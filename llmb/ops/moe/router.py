"""Which experts each token visits and with what weight, from the logits of its router.

    weights_NK, chosen_NK = route(logits_NE, bias_E, experts, places_N)

Scores are found from the logits, corrected by a bias for the choice alone, and may be compared within groups first.
Training takes the three steps one by one, since gradients pass through the scores; serving takes them in one kernel.
There, a token whose place is negative only fills up a step: it visits NOBODY, and no weights are read for it.

Shapes: N tokens, E experts, G groups of experts, K experts a token visits.
"""

from typing import Protocol

import torch
from torch import Tensor

from llmb.ops.dispatch import takes_triton

NOBODY = -1
NO_WEIGHT = 1e-20  # keeps a token whose scores all round to zero from dividing by it


class Rule(Protocol):
    """How a router decides, as `spec.Experts` says it."""

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


def router_scores(logits_NE: Tensor, rule: Rule) -> Tensor:
    """How much each token is drawn to each expert."""
    return logits_NE.sigmoid() if rule.score == "sigmoid" else logits_NE.softmax(dim=-1)


def choose(scores_NE: Tensor, bias_E: Tensor | None, rule: Rule) -> Tensor:
    """The experts with the highest corrected scores, from the groups whose two best add up to most, [N, K]."""
    choice_NE = scores_NE if bias_E is None else scores_NE + bias_E
    if rule.groups > 1:
        choice_NGE = choice_NE.unflatten(1, (rule.groups, -1))
        group_scores_NG = choice_NGE.topk(min(2, choice_NGE.shape[-1]), dim=-1).values.sum(dim=-1)
        best_NG = group_scores_NG.topk(rule.top_groups, dim=-1, sorted=False).indices
        closed_NG = torch.ones_like(group_scores_NG, dtype=torch.bool).scatter_(1, best_NG, False)
        choice_NE = choice_NGE.masked_fill(closed_NG[:, :, None], float("-inf")).flatten(1)
    return choice_NE.topk(rule.top_k, dim=-1, sorted=False).indices


def weigh(scores_NE: Tensor, chosen_NK: Tensor, rule: Rule) -> Tensor:
    """What each chosen expert's answer is multiplied by: its score without the correction."""
    weights_NK = scores_NE.gather(1, chosen_NK)
    if rule.renormalise:
        weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + NO_WEIGHT)
    return weights_NK * rule.scale


def route_reference(
    logits_NE: Tensor, bias_E: Tensor | None, rule: Rule, places_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The chosen experts' weights in fp32 and their numbers, both [N, K]."""
    scores_NE = router_scores(logits_NE, rule)
    chosen_NK = choose(scores_NE, bias_E, rule)
    weights_NK = weigh(scores_NE, chosen_NK, rule)
    return weights_NK, chosen_NK if places_N is None else chosen_NK.masked_fill(places_N[:, None] < 0, NOBODY)


def route(
    logits_NE: Tensor, bias_E: Tensor | None, rule: Rule, places_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same in one kernel where there is one; the K are in no particular order."""
    if takes_triton(logits_NE) and len(logits_NE):
        from llmb.ops.moe.router_triton import route_triton

        return route_triton(logits_NE, bias_E, rule, places_N)
    return route_reference(logits_NE, bias_E, rule, places_N)
