"""However a model is spread over ranks, its answers are those of one process, token for token; and a rank that fails
does not leave the others hanging.

The layouts are those of the recipes (TP8 EP8 PP2, TP4 EP4 with attention data parallelism) and simpler ones, which fail
more plainly. Prompts are cut into chunks, and the cache is so small that sequences are preempted.
"""

import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import on_ranks
from serving_ranks import Outcome, rank_engine, rank_outcome, served_by_ranks
from small_served import DEEPSEEK, GROK, LLAMA, NEMOTRON, config_of, written

from llmb.errors import ConfigError
from llmb.infer.engine import Engine
from llmb.infer.request import Request, Sampling
from llmb.infer.step import Launched, Plan
from llmb.infer.supported import check_layout
from llmb.models.architectures import build_model
from llmb.models.weights import load_weights
from llmb.spec import Model, Parallel

WIDE: dict[str, Any] = {"heads": 16, "vocab": 128, "layers": 4}
MODELS = {
    "llama": replace(LLAMA, **WIDE),  # with 2 heads of keys and values: fewer than ranks
    "deepseek": replace(DEEPSEEK, **WIDE, kv_heads=16, experts=replace(DEEPSEEK.experts, count=16, ffn=32)),
    "grok1": replace(GROK, **WIDE, experts=replace(GROK.experts, count=16)),
    "nemotron_h": replace(NEMOTRON, **WIDE | {"layers": 6}, mamba=replace(NEMOTRON.mamba, groups=4)),
}
MARGIN = 1e-4  # logits that the likeliest token must be ahead: what rounding changes is some hundred times less
SETTINGS: dict[str, Any] = {"max_num_tokens": 16, "max_batch_size": 6, "block_tokens": 4}
BLOCKS = 12  # of 4 tokens: one sequence of the longest

TP2, TP4, PP2, TP2_PP2 = {"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2}
TP4_EP2, TP4_EP4 = {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4}
TP4_EP4_DP = {**TP4_EP4, "attention_dp": True}
TP2_PP2_DP = {**TP2_PP2, "attention_dp": True}
TP8_EP8_PP2 = {"tp": 8, "ep": 8, "pp": 2}
TP8_EP8_PP2_DP = {**TP8_EP8_PP2, "attention_dp": True}
LAYOUTS = [
    *((name, layout) for name in MODELS for layout in (TP2, TP4, PP2, TP2_PP2, TP2_PP2_DP)),
    *((name, layout) for name in ("deepseek", "grok1") for layout in (TP4_EP2, TP4_EP4, TP4_EP4_DP)),
    *(("deepseek", layout) for layout in (TP8_EP8_PP2, TP8_EP8_PP2_DP)),
]
QUICK = [("llama", TP2), ("nemotron_h", PP2), ("grok1", TP2_PP2), ("deepseek", TP4_EP4_DP)]


def said(layout: dict[str, Any]) -> str:
    return " ".join(name if value is True else f"{name}{value}" for name, value in layout.items())


@dataclass(frozen=True)
class Case:
    """A model in a folder, requests to it, and what one process answers to them."""

    model: Model
    folder: Path
    requests: list[Request]
    outcome: Outcome

    def served(self, layout: dict[str, Any], blocks: int = BLOCKS, **more: Any) -> Outcome:
        gpus = Parallel(**{name: value for name, value in layout.items() if name != "attention_dp"}).world_size
        config = config_of(self.model, self.folder, gpus=gpus, **SETTINGS, **layout)
        return served_by_ranks(config, self.requests, blocks, **more)


def some_requests(vocab: int) -> list[Request]:
    """Of random lengths; an answer might end early for all the engine knows, so that it admits more than will fit."""
    draw, stop = random.Random(18), ((vocab,),)
    lengths = [(draw.choice((1, 3, 6, 9, 26)), draw.randint(10, 18)) for _ in range(8)]
    return [
        Request(number=number, prompt=[draw.randrange(vocab) for _ in range(count)], max_tokens=answer, stop=stop)
        for number, (count, answer) in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    """Writes a model and answers its requests by one process, once."""

    @cache
    def case(name: str) -> Case:
        model = MODELS[name]
        folder, requests = written(model, tmp_path_factory.mktemp(name)), some_requests(model.vocab)
        outcome = rank_outcome(0, config_of(model, folder, **SETTINGS), requests, BLOCKS, None)
        return Case(model, folder, requests, outcome)

    return case


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad
def test_one_process_answers_by_a_margin_and_what_the_network_would(case_of, name: str) -> None:
    case = case_of(name)
    network = build_model(case.model)
    load_weights(network, case.folder)
    margins = []
    for request in case.requests:
        answer = case.outcome.answers[request.number]
        logits_TV = network(torch.tensor([[*request.prompt, *answer]]))[0, len(request.prompt) - 1 : -1]
        best_T2 = logits_TV.topk(2, dim=-1)
        assert best_T2.indices[:, 0].tolist() == list(answer)
        margins.append((best_T2.values[:, 0] - best_T2.values[:, 1]).min().item())
    assert min(margins) > MARGIN
    assert case.outcome.preempted[0] > 0


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*case, id=f"{case[0]} {said(case[1])}", marks=[] if case in QUICK else [pytest.mark.slow])
        for case in LAYOUTS
    ],
)
def test_ranks_answer_as_one_process_does(case_of, name: str, layout: dict[str, Any]) -> None:
    case = case_of(name)
    found = case.served(layout)
    assert found.answers == case.outcome.answers
    schedulers = layout["tp"] if layout.get("attention_dp") else 1
    assert (sum(found.preempted) > 0) == (schedulers < len(case.requests))  # one alone has all of its cache
