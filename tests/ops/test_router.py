"""The router's choice in one kernel is the one that torch makes step by step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmb.config.spec import Experts
from llmb.ops.moe.router import route_reference

pytest.importorskip("triton")
from llmb.ops.moe.router_triton import route_triton

RULES = {
    "deepseek": Experts(count=256, top_k=8, ffn=1, groups=8, top_groups=4, score="sigmoid", scale=2.5),
    "grok1": Experts(count=8, top_k=2, ffn=1, renormalise=False),
    "no powers of two": Experts(count=30, top_k=5, ffn=1, groups=6, top_groups=3, score="sigmoid", renormalise=False),
    "one in a group": Experts(count=6, top_k=3, ffn=1, groups=6, top_groups=4, scale=0.5),
    "all": Experts(count=5, top_k=5, ffn=1),
}


def by_number(weights_NK: Tensor, chosen_NK: Tensor) -> tuple[Tensor, Tensor]:
    chosen_NK, order_NK = chosen_NK.cpu().sort(dim=1)
    return weights_NK.cpu().gather(1, order_NK), chosen_NK


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("tokens", [1, 19])
def test_one_kernel_chooses_as_torch_does(rule: Experts, tokens: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits_NE = 2 * torch.randn(tokens, rule.count, generator=generator)
    bias_E = torch.randn(rule.count, generator=generator) / 4 if rule.score == "sigmoid" else None
    weights, chosen = by_number(*route_reference(logits_NE, bias_E, rule))
    found, names = by_number(*route_triton(logits_NE.to(device), None if bias_E is None else bias_E.to(device), rule))
    assert torch.equal(names, chosen)
    assert names.dtype == torch.int64
    torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-7)


def test_the_correction_chooses_and_does_not_weigh(device: torch.device) -> None:
    rule = replace(RULES["grok1"], score="sigmoid", top_k=1)
    bias_E = torch.tensor([0.0] * 7 + [5.0]).to(device)
    weights, chosen = route_triton(torch.zeros(1, 8, device=device), bias_E, rule)
    assert (chosen.item(), weights.item()) == (7, 0.5)


def test_scores_that_all_round_to_zero_weigh_nothing(device: torch.device) -> None:
    rule = RULES["deepseek"]
    weights, chosen = route_triton(torch.full((2, 256), -1000.0, device=device), torch.zeros(256, device=device), rule)
    assert (weights == 0).all()
    assert (chosen.sort(dim=1).values.diff(dim=1) > 0).all()


def test_tokens_without_a_place_visit_nobody(device: torch.device) -> None:
    rule, logits_NE = RULES["grok1"], torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    places_N = torch.tensor([17, -1, 0])
    _, wanted = by_number(*route_reference(logits_NE, None, rule, places_N))
    _, found = by_number(*route_triton(logits_NE.to(device), None, rule, places_N.to(device)))
    assert torch.equal(found, wanted)
    assert [(row == -1).all().item() for row in found] == [False, True, False]
