"""The router kernel selects the same experts as torch does step by step."""

from dataclasses import replace

import pytest
import torch
from op_cases.moe import ROUTING_RULES
from torch import Tensor

from llmb.config.model import MoEConfig
from llmb.ops.moe.router import route

pytest.importorskip("triton")


def sorted_by_expert(topk_weights_NK: Tensor, topk_ids_NK: Tensor) -> tuple[Tensor, Tensor]:
    topk_ids_NK, order_NK = topk_ids_NK.cpu().sort(dim=1)
    return topk_weights_NK.cpu().gather(1, order_NK), topk_ids_NK


@pytest.mark.parametrize("rule", ROUTING_RULES.values(), ids=ROUTING_RULES)
@pytest.mark.parametrize("tokens", [1, 19])
def test_kernel_matches_reference_in_any_order_of_k(rule: MoEConfig, tokens: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits_NE = 2 * torch.randn(tokens, rule.count, generator=generator)
    bias_E = torch.randn(rule.count, generator=generator) / 4 if rule.score == "sigmoid" else None
    expected_weights, expected_ids = sorted_by_expert(*route.reference(logits_NE, bias_E, rule))
    bias_E = None if bias_E is None else bias_E.to(device)
    weights, ids = sorted_by_expert(*route.triton(logits_NE.to(device), bias_E, rule))
    assert torch.equal(ids, expected_ids)
    assert ids.dtype == torch.int64
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_bias_affects_the_selection_but_not_the_weights(device: torch.device) -> None:
    rule = replace(ROUTING_RULES["softmax"], score="sigmoid", top_k=1)
    bias_E = torch.tensor([0.0] * 7 + [5.0]).to(device)
    weights, ids = route.triton(torch.zeros(1, 8, device=device), bias_E, rule)
    assert (ids.item(), weights.item()) == (7, 0.5)


def test_scores_that_all_round_to_zero_have_zero_weight(device: torch.device) -> None:
    rule = ROUTING_RULES["grouped sigmoid"]
    weights, ids = route.triton(torch.full((2, 256), -1000.0, device=device), torch.zeros(256, device=device), rule)
    assert (weights == 0).all()
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()
