"""Quantized weights and KV caches in the whole engine: the error is that of the format, neither larger nor zero.

Quantization errors are independent: their squares add up over the gemms of a token; attention and gates amplify some,
for which there is a factor of two. Tokens are routed to every expert, so that rounding does not change the routing.
Nothing here depends on which tokens share a step, except with per-tensor activation scales.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from nightly_cases import by_turns
from small_models import gpt_oss_model
from small_served import (
    CPU,
    DEEPSEEK,
    GROK,
    LLAMA,
    MAX_OUTPUT,
    MAX_SEQ_LEN,
    NEMOTRON,
    SINGLE_RANK_INFO,
    Scenario,
    config_of,
    engine_for,
    logits_of,
    prompts_for,
    run_scenario,
    scenarios,
    serve,
    served_model_for,
    write_weights,
)
from torch import Tensor, nn

from llmb.config.model import MlaConfig, Model, MoEConfig
from llmb.models.architectures import build_model
from llmb.models.hf_weights import load_weights
from llmb.ops.gemm.block_scaled_gemm import dequantize_blocks, quantize_blocks
from llmb.ops.quant.activation_quant import QuantFormat, dequantize, quantize_activation
from llmb.ops.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from llmb.serve.benchmark.engine_facts import engine_facts
from llmb.serve.engine_builder import build_engine, serving_dtypes, weight_source
from llmb.serve.layers.served_linear import Format
from llmb.serve.layers.served_model import ServedModel, ServingDtypes, build_served_model
from llmb.serve.rank_groups import RankGroups
from llmb.serve.request import Request

WIDE: dict[str, Any] = {"hidden": 128, "ffn": 256, "heads": 4, "head_dim": 32, "vocab": 97}
EXPERTS = MoEConfig(count=4, top_k=4, ffn=128)
MODELS = [
    replace(LLAMA, **WIDE),
    replace(
        DEEPSEEK,
        **WIDE,
        experts=replace(EXPERTS, shared=1, dense_layers=1, score="sigmoid", scale=2.5),
        mla=MlaConfig(q_rank=128, kv_rank=128, nope_dim=32, rope_dim=16, value_dim=32),
    ),
    replace(NEMOTRON, **WIDE),
    replace(GROK, **WIDE, experts=replace(EXPERTS, renormalise=False)),
    gpt_oss_model(name="gpt_oss", **(WIDE | {"ffn": EXPERTS.ffn}), experts=replace(EXPERTS, bias=True)),
]
SCALE = 0.09  # of weights, so that gemms preserve the magnitude

# Number of consecutive gemms, and of reads of cached keys and values.
PRODUCTS = {"llama": 2 * 4, "deepseek": 3 * 5, "nemotron_h": 6 * 2, "grok1": 2 * 4, "gpt_oss": 2 * 4}
CACHED = {"llama": 2 * 2, "deepseek": 3 * 2, "nemotron_h": 2, "grok1": 2 * 2, "gpt_oss": 2 * 2}
FP8 = {"dtype": "fp8", "fp8_recipe": "channelwise"}
NVFP4 = {"dtype": "nvfp4"}
PRECISIONS: list[dict[str, str]] = [
    FP8,
    FP8 | {"fp8_recipe": "tensorwise"},
    FP8 | {"fp8_recipe": "blockwise"},
    FP8 | {"kv_dtype": "fp8"},
    NVFP4,
]
CACHE = {"dtype": "fp32", "kv_dtype": "fp8"}


def precision_id(precision: dict[str, str]) -> str:
    return "-".join(precision.values())


def case_id(value: Model | dict[str, str]) -> str:
    return value.name if isinstance(value, Model) else precision_id(value)


def relative_error(actual: Tensor, reference: Tensor) -> float:
    return ((actual.float() - reference).norm() / reference.norm()).item()


def rounding(precision: dict[str, str]) -> float:
    """Return the relative quantization error of a gemm's operands."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    fp8 = relative_error(dequantize(quantize_activation(weight, "per_token"), torch.float32), weight)
    return (
        relative_error(dequantize_nvfp4(quantize_nvfp4(weight)), weight)
        if precision["dtype"] == "nvfp4"
        else math.sqrt(2) * fp8
    )


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

    def served_model(self, precision: dict[str, str]) -> ServedModel:
        return served_model_for(config_of(self.model, self.folder, **precision))


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Model], Case]:
    """Write a model and compute its logits once."""

    @cache
    def build(model: Model) -> Case:
        folder = write_weights(model, tmp_path_factory.mktemp("weights") / model.name, SCALE)
        text = prompts_for(model.vocab)[-1]
        return Case(model, folder, text, logits_of(served_model_for(config_of(model, folder)), text))

    return build


@pytest.fixture(params=MODELS, ids=lambda model: model.name)
def case(request: pytest.FixtureRequest, case_of: Callable[[Model], Case]) -> Case:
    return case_of(request.param)


@pytest.mark.parametrize("precision", [*PRECISIONS, CACHE], ids=precision_id)
def test_logits_error_matches_quantization_error(case: Case, precision: dict[str, str]) -> None:
    error = relative_error(logits_of(case.served_model(precision), case.text), case.logits_NV)
    likely = expected(case.model, precision)
    assert likely / 10 < error < 2 * likely, "neither more than the format's rounding nor none at all"


@pytest.mark.slow
@pytest.mark.parametrize(("case", "precision"), by_turns(MODELS, [*PRECISIONS, CACHE], name=case_id), indirect=["case"])
def test_chunked_prefill_error_is_below_quantization_error(case: Case, precision: dict[str, str]) -> None:
    """Another order of summation, or absorbed kv_up, rounds differently."""
    if precision.get("fp8_recipe") == "tensorwise":
        pytest.skip("a per-tensor scale depends on all tokens of the step")
    served_model = case.served_model(precision)
    whole_NV = logits_of(served_model, case.text).float()
    for chunk in (1, 3, 20):
        starts = [*range(0, len(case.text), chunk), len(case.text)]
        assert relative_error(logits_of(served_model, case.text, starts=starts), whole_NV) < expected(
            case.model, precision
        )


@pytest.mark.slow
@pytest.mark.parametrize(("case", "precision"), by_turns(MODELS, PRECISIONS, name=case_id), indirect=["case"])
def test_engine_generates_full_outputs(case: Case, precision: dict[str, str]) -> None:
    config = config_of(case.model, case.folder, **precision)
    engine = build_engine(config, SINGLE_RANK_INFO, MAX_SEQ_LEN)
    pool = prompts_for(case.model.vocab)
    collector = serve(
        engine, [Request(request_id=n, prompt=prompt, max_tokens=MAX_OUTPUT) for n, prompt in enumerate(pool)]
    )
    assert [len(tokens) for tokens in collector.tokens()] == [MAX_OUTPUT] * len(pool)
    assert len(set(collector.tokens())) > len(pool) // 2
    facts = engine_facts(engine, config, 0)
    plain = engine_facts(
        build_engine(config_of(case.model, case.folder, dtype="bf16"), SINGLE_RANK_INFO, MAX_SEQ_LEN), config, 0
    )
    if precision["dtype"] == "fp8":
        assert facts.weight_bytes < 0.9 * plain.weight_bytes
    assert facts.dequantised == (precision["dtype"] == "nvfp4")
    if "kv_dtype" in precision:
        assert facts.cache_bytes < plain.cache_bytes


# -- outputs

SHORT = 3  # tokens; too few longer outputs have a clear margin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "precision"),
    by_turns(MODELS, [FP8 | {"kv_dtype": "fp8"}, NVFP4, CACHE], period=3, name=case_id),
    indirect=["case"],
)
def test_outputs_with_clear_margin_do_not_depend_on_batching(case: Case, precision: dict[str, str]) -> None:
    if case.model.mla and precision != CACHE:
        pytest.skip("absorbed queries differ in bf16, within the bound tested above")
    served_model = case.served_model(precision)
    pool = clear_answers(served_model)
    assert len(pool) >= 3

    @settings(max_examples=5, deadline=None)
    @given(scenario=scenarios())
    def check(scenario: Scenario) -> None:
        scenario = replace(scenario, cancels={}, max_tokens=[min(SHORT, most) for most in scenario.max_tokens])
        chosen = [pool[place % len(pool)] for place in scenario.prompts]
        requests = [Request(request_id=n, prompt=prompt, max_tokens=SHORT) for n, (prompt, _) in enumerate(chosen)]
        reference = [output[:most] for (_, output), most in zip(chosen, scenario.max_tokens, strict=True)]
        assert run_scenario(served_model, scenario, requests).tokens() == reference

    check()


def clear_answers(served_model: ServedModel) -> list[tuple[list[int], tuple[int, ...]]]:
    """Return prompts and short outputs in which no second token was nearly as likely."""
    prompts = torch.randint(served_model.spec.vocab, (120, 5), generator=torch.Generator().manual_seed(4)).tolist()
    requests = [Request(request_id=n, prompt=prompt, max_tokens=SHORT) for n, prompt in enumerate(prompts)]
    outputs = serve(engine_for(served_model), requests).tokens()
    clear = []
    for prompt, output in zip(prompts, outputs, strict=True):
        logits_NV = logits_of(served_model, [*prompt, *output]).float()[len(prompt) - 1 : -1]
        best_N2 = logits_NV.topk(2).values
        if (best_N2[:, 0] - best_N2[:, 1]).min() > 0.25 * logits_NV.std():
            clear.append((prompt, output))
    return clear


# -- exact comparison


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8_channel": lambda weight: dequantize(quantize_activation(weight, "per_token"), torch.float32),
    "fp8_block": lambda weight: dequantize_blocks(quantize_blocks(weight), len(weight)),
    "nvfp4": lambda weight: dequantize_nvfp4(quantize_nvfp4(weight)),
}


def quantize_linear(layer: nn.Linear, rounded: Callable[[Tensor], Tensor], form: QuantFormat) -> None:
    """Quantize a layer as the engine does, where it may be fused with others."""
    layer.weight.data = rounded(layer.weight.data)
    layer.register_forward_pre_hook(
        lambda _, inputs: dequantize(quantize_activation(inputs[0][0], form), torch.float32)[None]
    )


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_block", "nvfp4"])
def test_logits_equal_network_with_quantized_linears(format: Format, tmp_path: Path) -> None:
    """The residual is in fp32, so that nothing else is rounded; the LM head is not quantized."""
    model = replace(MODELS[0], heads=4, kv_heads=4)  # q, k and v are whole blocks
    config = config_of(model, write_weights(model, tmp_path / "weights", SCALE))
    network = build_model(model)
    load_weights(network, tmp_path / "weights")
    forms: dict[str, QuantFormat] = {"fp8_channel": "per_token", "fp8_block": "1x128", "nvfp4": "plain"}
    for layer in network.layers:
        attention, mlp = layer.attention, layer.mlp
        for linear in (attention.q, attention.k, attention.v, attention.o, mlp.gate, mlp.up, mlp.down):
            quantize_linear(linear, ROUNDED[format], forms[format])
    text = prompts_for(model.vocab)[-1]
    with torch.no_grad():
        reference_NV = network(torch.tensor([text]))[0]
    dtypes = ServingDtypes(torch.float32, format, torch.float32)
    served_model = build_served_model(model, weight_source(config, CPU), dtypes, RankGroups(device=CPU))
    plain = build_served_model(model, weight_source(config, CPU), serving_dtypes(config), RankGroups(device=CPU))
    assert relative_error(logits_of(plain, text), reference_NV) > 0.05
    assert relative_error(logits_of(served_model, text), reference_NV) < 1e-3  # ties may be rounded differently
