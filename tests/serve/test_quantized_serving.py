"""Weights and caches in few bits, through the whole engine: as near to fp32 as their rounding allows, and no nearer.

Rounding errors of a format are independent, so they add up in squares over the products that a token goes through;
attention and gates make more of some, for which there is a factor of two. Every expert is visited, so that rounding
chooses no other one. Nothing here depends on which tokens share a step, except with one scale for all of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from small_served import (
    ALONE,
    ANSWER,
    CPU,
    DEEPSEEK,
    GROK,
    LLAMA,
    LONGEST,
    NEMOTRON,
    Scene,
    config_of,
    engine_for,
    logits_of,
    play,
    prompts_for,
    scenes,
    serve,
    stack_of,
    written,
)
from torch import Tensor, nn

from llmb.config.spec import Experts, Latent, Model
from llmb.models.architectures import build_model
from llmb.models.hf_weights import load_weights
from llmb.ops.gemm.block_scaled_gemm import from_blocks, in_blocks
from llmb.ops.quant.activation_quant import Form, as_plain, in_form
from llmb.ops.quant.nvfp4 import from_nvfp4, in_nvfp4
from llmb.serve.benchmark.engine_facts import engine_facts
from llmb.serve.engine_builder import open_engine, weights_of
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import How, Stack, build_stack
from llmb.serve.rank_groups import Ranks
from llmb.serve.request import Request
from llmb.serve.served_dtypes import how_of

WIDE: dict[str, Any] = {"hidden": 128, "ffn": 256, "heads": 4, "head_dim": 32, "vocab": 97}
EXPERTS = Experts(count=4, top_k=4, ffn=128)
MODELS = [
    replace(LLAMA, **WIDE),
    replace(
        DEEPSEEK,
        **WIDE,
        experts=replace(EXPERTS, shared=1, dense_layers=1, score="sigmoid", scale=2.5),
        latent=Latent(q_rank=128, kv_rank=128, nope_dim=32, rope_dim=16, value_dim=32),
    ),
    replace(NEMOTRON, **WIDE),
    replace(GROK, **WIDE, experts=replace(EXPERTS, renormalise=False)),
]
SCALE = 0.09  # of weights: products keep the size of what goes in

# One after the other: of weights, and of keys and values that are cached.
PRODUCTS = {"llama": 2 * 4, "deepseek": 3 * 5, "nemotron_h": 6 * 2, "grok1": 2 * 4}
CACHED = {"llama": 2 * 2, "deepseek": 3 * 2, "nemotron_h": 2, "grok1": 2 * 2}
FP8 = {"dtype": "fp8", "fp8_scaling": "channel"}
PRECISIONS: list[dict[str, str]] = [
    FP8,
    FP8 | {"fp8_scaling": "tensor"},
    FP8 | {"fp8_scaling": "block"},
    FP8 | {"kv_dtype": "fp8"},
    {"dtype": "nvfp4"},
]
CACHE = {"dtype": "fp32", "kv_dtype": "fp8"}


def named(precision: dict[str, str]) -> str:
    return "-".join(precision.values())


def apart(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.float() - theirs).norm() / theirs.norm()).item()


def rounding(precision: dict[str, str]) -> float:
    """By how much rounding changes a weight and what it is multiplied with, relative to them."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    fp8 = apart(as_plain(in_form(weight, "rows8"), torch.float32), weight)
    return apart(from_nvfp4(in_nvfp4(weight)), weight) if precision["dtype"] == "nvfp4" else math.sqrt(2) * fp8


def expected(model: Model, precision: dict[str, str]) -> float:
    if precision == CACHE:
        return rounding(FP8) / math.sqrt(2) * math.sqrt(CACHED[model.name])
    return rounding(precision) * math.sqrt(PRODUCTS[model.name])


@dataclass(frozen=True)
class Case:
    """A model, its weights, and the logits of a text in fp32."""

    model: Model
    folder: Path
    text: list[int]
    logits_NV: Tensor

    def stack(self, precision: dict[str, str]) -> Stack:
        return stack_of(config_of(self.model, self.folder, **precision))


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model: Model = request.param
    folder = written(model, tmp_path_factory.mktemp("weights") / model.name, SCALE)
    text = prompts_for(model.vocab)[-1]
    return Case(model, folder, text, logits_of(stack_of(config_of(model, folder)), text))


@pytest.mark.parametrize("precision", [*PRECISIONS, CACHE], ids=named)
def test_logits_are_as_near_to_fp32_as_rounding_allows(case: Case, precision: dict[str, str]) -> None:
    error = apart(logits_of(case.stack(precision), case.text), case.logits_NV)
    likely = expected(case.model, precision)
    assert likely / 10 < error < 2 * likely, "neither more than the format's rounding nor none at all"


@pytest.mark.parametrize("precision", [*PRECISIONS, CACHE], ids=named)
def test_chunks_change_less_than_the_format_does(case: Case, precision: dict[str, str]) -> None:
    """Sums in another order, or queries with kv_up absorbed, round differently here and there."""
    if precision.get("fp8_scaling") == "tensor":
        pytest.skip("one scale for all tokens of a step is of the step")
    stack = case.stack(precision)
    whole_NV = logits_of(stack, case.text).float()
    for chunk in (1, 3, 20):
        starts = [*range(0, len(case.text), chunk), len(case.text)]
        assert apart(logits_of(stack, case.text, starts=starts), whole_NV) < expected(case.model, precision)


@pytest.mark.parametrize("precision", PRECISIONS, ids=named)
def test_a_run_opens_and_answers_in_full(case: Case, precision: dict[str, str]) -> None:
    config = config_of(case.model, case.folder, **precision)
    engine = open_engine(config, ALONE, LONGEST)
    pool = prompts_for(case.model.vocab)
    heard = serve(engine, [Request(number=n, prompt=prompt, max_tokens=ANSWER) for n, prompt in enumerate(pool)])
    assert [len(tokens) for tokens in heard.tokens()] == [ANSWER] * len(pool)
    assert len(set(heard.tokens())) > len(pool) // 2
    facts = engine_facts(engine, config, 0)
    plain = engine_facts(open_engine(config_of(case.model, case.folder, dtype="bf16"), ALONE, LONGEST), config, 0)
    if precision["dtype"] == "fp8":
        assert facts.weight_bytes < 0.9 * plain.weight_bytes
    assert facts.dequantised == (precision["dtype"] == "nvfp4")
    if "kv_dtype" in precision:
        assert facts.cache_bytes < plain.cache_bytes


# -- answers

SHORT = 3  # tokens; of longer ones too few are clear


@pytest.mark.parametrize("precision", [CACHE, FP8 | {"kv_dtype": "fp8"}, {"dtype": "nvfp4"}], ids=named)
def test_clear_answers_are_the_same_however_they_are_computed(case: Case, precision: dict[str, str]) -> None:
    if case.model.latent and precision != CACHE:
        pytest.skip("bf16 tells absorbed queries from others: see above by how much")
    stack = case.stack(precision)
    pool = clear_answers(stack)
    assert len(pool) >= 3

    @settings(max_examples=8, deadline=None)
    @given(scene=scenes())
    def check(scene: Scene) -> None:
        scene = replace(scene, cancels={}, max_tokens=[min(SHORT, most) for most in scene.max_tokens])
        asked = [pool[place % len(pool)] for place in scene.prompts]
        requests = [Request(number=n, prompt=prompt, max_tokens=SHORT) for n, (prompt, _) in enumerate(asked)]
        wanted = [answer[:most] for (_, answer), most in zip(asked, scene.max_tokens, strict=True)]
        assert play(stack, scene, requests).tokens() == wanted

    check()


def clear_answers(stack: Stack) -> list[tuple[list[int], tuple[int, ...]]]:
    """Prompts and their short answers, of those in which no second token was nearly as likely."""
    prompts = torch.randint(stack.model.vocab, (120, 5), generator=torch.Generator().manual_seed(4)).tolist()
    requests = [Request(number=n, prompt=prompt, max_tokens=SHORT) for n, prompt in enumerate(prompts)]
    answers = serve(engine_for(stack), requests).tokens()
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits_NV = logits_of(stack, [*prompt, *answer]).float()[len(prompt) - 1 : -1]
        best_N2 = logits_NV.topk(2).values
        if (best_N2[:, 0] - best_N2[:, 1]).min() > 0.25 * logits_NV.std():
            found.append((prompt, answer))
    return found


# -- exactly


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8_channel": lambda weight: as_plain(in_form(weight, "rows8"), torch.float32),
    "fp8_block": lambda weight: from_blocks(in_blocks(weight), len(weight)),
    "nvfp4": lambda weight: from_nvfp4(in_nvfp4(weight)),
}


def round_product(layer: nn.Linear, rounded: Callable[[Tensor], Tensor], form: Form) -> None:
    """As the engine rounds it, where it may be one layer with others of the same input."""
    layer.weight.data = rounded(layer.weight.data)
    layer.register_forward_pre_hook(lambda _, given: as_plain(in_form(given[0][0], form), torch.float32)[None])


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_block", "nvfp4"])
def test_a_network_whose_products_are_rounded_gives_the_same(format: Format, tmp_path: Path) -> None:
    """With the stream in fp32, so that nothing else is rounded; heads stay as they are."""
    model = replace(MODELS[0], heads=4, kv_heads=4)  # q, k and v are whole blocks each
    config = config_of(model, written(model, tmp_path / "weights", SCALE))
    network = build_model(model)
    load_weights(network, tmp_path / "weights")
    forms: dict[str, Form] = {"fp8_channel": "rows8", "fp8_block": "groups8", "nvfp4": "plain"}
    for layer in network.layers:
        attention, mlp = layer.attention, layer.mlp
        for one in (attention.q, attention.k, attention.v, attention.o, mlp.gate, mlp.up, mlp.down):
            round_product(one, ROUNDED[format], forms[format])
    text = prompts_for(model.vocab)[-1]
    with torch.no_grad():
        wanted_NV = network(torch.tensor([text]))[0]
    how = How(torch.float32, format, torch.float32)
    stack = build_stack(model, weights_of(config, CPU), how, Ranks(device=CPU))
    plain = build_stack(model, weights_of(config, CPU), how_of(config), Ranks(device=CPU))
    assert apart(logits_of(plain, text), wanted_NV) > 0.05
    assert apart(logits_of(stack, text), wanted_NV) < 1e-3  # a number half-way between two may go to the other
