"""Router top-k as one Triton kernel, one program per token; `router.py` defines what it computes.

In torch it is a dozen operations on a few numbers, each dominated by launch latency. Experts are laid out as
[groups, experts of a group], both padded to powers of two with experts that are never selected.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.ops.dependent_launch import pdl_options, pdl_wait
from llmb.ops.moe.router import NO_EXPERT, WEIGHT_SUM_EPS, RoutingRule


@triton.jit
def _route_kernel(
    logits, bias, slot_mapping, topk_weights, topk_ids, experts, scale,
    NO_EXPERT: tl.constexpr, EPS: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_GROUP_SIZE: tl.constexpr, BLOCK_TOP_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_GROUP_SIZE)
    mask = (group < GROUPS)[:, None] & (member < GROUP_SIZE)[None, :]
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    logit = tl.load(logits + token * experts + expert, mask=mask, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        power = tl.exp(logit - tl.max(logit))
        score = power / tl.sum(power)
    corrected = score
    if bias is not None:
        corrected += tl.load(bias + expert, mask=mask, other=0.0)
    corrected = tl.where(mask, corrected, float("-inf"))
    if GROUPS > 1:
        group_score = tl.max(corrected, axis=1)
        if GROUP_SIZE > 1:
            first = tl.argmax(corrected, axis=1)
            group_score += tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), corrected), axis=1)
        selected = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = group == tl.argmax(group_score, axis=0)
            selected = selected | best
            group_score = tl.where(best, float("-inf"), group_score)
        corrected = tl.where(selected[:, None], corrected, float("-inf"))
    corrected, score = tl.ravel(corrected), tl.ravel(score)
    index = tl.arange(0, BLOCK_GROUPS * BLOCK_GROUP_SIZE)
    rank = tl.arange(0, BLOCK_TOP_K)
    weight, expert_id = tl.zeros((BLOCK_TOP_K,), tl.float32), tl.zeros((BLOCK_TOP_K,), tl.int64)
    for k in tl.static_range(TOP_K):
        # Not tl.argmax: where a reduction is the only user of a flattened tensor, Triton may reorder its elements.
        best_index = tl.min(tl.where(corrected == tl.max(corrected, axis=0), index, BLOCK_GROUPS * BLOCK_GROUP_SIZE))
        best_index = tl.where(best_index < BLOCK_GROUPS * BLOCK_GROUP_SIZE, best_index, 0)  # all are NaN
        weight = tl.where(rank == k, tl.sum(tl.where(index == best_index, score, 0.0)), weight)
        unpadded = best_index // BLOCK_GROUP_SIZE * GROUP_SIZE + best_index % BLOCK_GROUP_SIZE
        expert_id = tl.where(rank == k, unpadded, expert_id)
        corrected = tl.where(index == best_index, float("-inf"), corrected)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight) + EPS)
    if slot_mapping is not None:
        expert_id = tl.where(tl.load(slot_mapping + token) < 0, NO_EXPERT, expert_id)
    tl.store(topk_weights + token * TOP_K + rank, weight * scale, mask=rank < TOP_K)
    tl.store(topk_ids + token * TOP_K + rank, expert_id, mask=rank < TOP_K)


def route_triton(
    logits_NE: Tensor, bias_E: Tensor | None, rule: RoutingRule, slot_mapping_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `router.route`; of equal scores the earlier expert's counts as higher."""
    tokens, experts = logits_NE.shape
    topk_weights_NK = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits_NE.device)
    topk_ids_NK = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=logits_NE.device)
    group_size = experts // rule.groups
    _route_kernel[tokens,](
        logits_NE.contiguous(), bias_E, slot_mapping_N, topk_weights_NK, topk_ids_NK, experts, rule.scale,
        NO_EXPERT=NO_EXPERT, EPS=WEIGHT_SUM_EPS, GROUPS=rule.groups, GROUP_SIZE=group_size,
        TOP_GROUPS=rule.top_groups, TOP_K=rule.top_k,
        SIGMOID=rule.score == "sigmoid", RENORMALIZE=rule.renormalise,
        BLOCK_GROUPS=triton.next_power_of_2(rule.groups), BLOCK_GROUP_SIZE=triton.next_power_of_2(group_size),
        BLOCK_TOP_K=triton.next_power_of_2(rule.top_k), num_warps=1, **pdl_options(tokens),
    )  # fmt: skip
    return topk_weights_NK, topk_ids_NK
