"""The router's choice as one Triton kernel, one program for each token; `router.py` says what it computes.

In torch it is a dozen operations on a few numbers, each of which takes a GPU longer to begin than to do. Experts stand
in a square of groups, both sides filled up to powers of two with experts that nobody chooses.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import begins, dependent
from llmb.ops.moe.router import NO_WEIGHT, NOBODY, Rule


@triton.jit
def _route_kernel(
    logits, bias, places, weights, chosen, experts, scale,
    NOBODY: tl.constexpr, NO_WEIGHT: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS_TILE: tl.constexpr, EACH_TILE: tl.constexpr, TOP_K_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begins(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS_TILE), tl.arange(0, EACH_TILE)
    inside = (group < GROUPS)[:, None] & (member < EACH)[None, :]
    expert = group[:, None] * EACH + member[None, :]
    logit = tl.load(logits + token * experts + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        power = tl.exp(logit - tl.max(logit))
        score = power / tl.sum(power)
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        best = tl.max(choice, axis=1)
        if EACH > 1:
            first = tl.argmax(choice, axis=1)
            best += tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), choice), axis=1)
        opened = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            taken = group == tl.argmax(best, axis=0)
            opened = opened | taken
            best = tl.where(taken, float("-inf"), best)
        choice = tl.where(opened[:, None], choice, float("-inf"))
    choice, score = tl.ravel(choice), tl.ravel(score)
    place = tl.arange(0, GROUPS_TILE * EACH_TILE)
    rank = tl.arange(0, TOP_K_TILE)
    weight, name = tl.zeros((TOP_K_TILE,), tl.float32), tl.zeros((TOP_K_TILE,), tl.int64)
    for number in tl.static_range(TOP_K):
        taken = tl.argmax(choice, axis=0)
        weight = tl.where(rank == number, tl.sum(tl.where(place == taken, score, 0.0)), weight)
        name = tl.where(rank == number, taken // EACH_TILE * EACH + taken % EACH_TILE, name)
        choice = tl.where(place == taken, float("-inf"), choice)
    if RENORMALISE:
        weight = weight / (tl.sum(weight) + NO_WEIGHT)
    if places is not None:
        name = tl.where(tl.load(places + token) < 0, NOBODY, name)
    tl.store(weights + token * TOP_K + rank, weight * scale, mask=rank < TOP_K)
    tl.store(chosen + token * TOP_K + rank, name, mask=rank < TOP_K)


def route_triton(
    logits_NE: Tensor, bias_E: Tensor | None, rule: Rule, places_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `router.route`; of equal scores the earlier expert's counts as higher."""
    tokens, experts = logits_NE.shape
    weights_NK = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits_NE.device)
    chosen_NK = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=logits_NE.device)
    each = experts // rule.groups
    _route_kernel[tokens,](
        logits_NE.contiguous(), bias_E, places_N, weights_NK, chosen_NK, experts, rule.scale,
        NOBODY=NOBODY, NO_WEIGHT=NO_WEIGHT, GROUPS=rule.groups, EACH=each, TOP_GROUPS=rule.top_groups, TOP_K=rule.top_k,
        SIGMOID=rule.score == "sigmoid", RENORMALISE=rule.renormalise,
        GROUPS_TILE=triton.next_power_of_2(rule.groups), EACH_TILE=triton.next_power_of_2(each),
        TOP_K_TILE=triton.next_power_of_2(rule.top_k), num_warps=1, **dependent(tokens),
    )  # fmt: skip
    return weights_NK, chosen_NK
