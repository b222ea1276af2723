"""Served outputs equal those of `transformers`, token for token, for any batching, chunking and preemption."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_served import (
    LLAMA,
    MAX_OUTPUT,
    MAX_SEQ_LEN,
    MODELS,
    NEMOTRON,
    SINGLE_RANK_INFO,
    EagerReplays,
    Pool,
    Scenario,
    check_idle,
    config_of,
    engine_for,
    reference_outputs,
    run_scenario,
    scenarios,
    serve,
    served_model_for,
    write_weights,
)
from triton_interpreter import force_kernels, interpreter  # noqa: F401  # fixtures

from llmb.config.model import Model
from llmb.config.spec import RunConfig
from llmb.serve.engine_builder import build_engine
from llmb.serve.layers import served_mla
from llmb.serve.layers.served_model import ServedModel
from llmb.serve.request import Request, RequestOutput
from llmb.serve.step_graphs import GraphSize

CLEAR = 1e-3  # far above the rounding error, which is near 1e-6 of logits near 1


@dataclass(frozen=True)
class Case:
    """A served model and its expected outputs."""

    config: RunConfig
    served_model: ServedModel
    pool: Pool

    @property
    def model(self) -> Model:
        return self.config.model

    def request(self, number: int, prompt: int) -> Request:
        return Request(request_id=number, prompt=self.pool.prompts[prompt], max_tokens=MAX_OUTPUT)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model: Model = request.param
    folder = write_weights(model, tmp_path_factory.mktemp("weights") / model.name)
    config = config_of(model, folder)
    return Case(config, served_model_for(config), reference_outputs(model, folder))


@pytest.mark.slow
def test_reference_has_a_clear_margin(case: Case) -> None:
    assert case.pool.margin > CLEAR
    outputs = set(case.pool.outputs)
    assert len(outputs) > len(case.pool.prompts) // 2, "prompts matter"
    assert len({token for output in outputs for token in output}) > 20, "outputs do not repeat one token"


def test_built_engine_equals_transformers(case: Case) -> None:
    engine = build_engine(case.config, SINGLE_RANK_INFO, MAX_SEQ_LEN)
    collector = serve(engine, [case.request(number, number) for number in range(len(case.pool.prompts))])
    assert collector.tokens() == case.pool.outputs


# -- random scenarios


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(scenario=scenarios(), expanded_from=st.sampled_from([2, served_mla.MIN_EXPANDED_CHUNK]))
def test_parity_for_any_batching_chunking_and_preemption(case: Case, scenario: Scenario, expanded_from: int) -> None:
    requests = [case.request(number, prompt) for number, prompt in enumerate(scenario.prompts)]
    with mock.patch.object(served_mla, "MIN_EXPANDED_CHUNK", expanded_from):
        collector = run_scenario(case.served_model, scenario, requests)
    for number, (prompt, most) in enumerate(zip(scenario.prompts, scenario.max_tokens, strict=True)):
        check(collector.outputs[number], case.pool.outputs[prompt][:most])


def check(output: RequestOutput, expected: tuple[int, ...]) -> None:
    if output.finish_reason == "cancelled":
        assert output.token_ids == expected[: len(output.token_ids)]
    else:
        assert output.token_ids == expected


# -- preemption and prefix cache


def test_parity_with_preemption(case: Case) -> None:
    """Two sequences of unknown length that together need more blocks than there are, are both admitted."""
    stop = ((case.model.vocab,),)  # never sampled, which the engine cannot know
    requests = [
        Request(request_id=number, prompt=case.pool.prompts[prompt], max_tokens=MAX_OUTPUT, stop=stop)
        for number, prompt in enumerate((0, 9, 1))
    ]
    engine = engine_for(case.served_model, blocks=20, block_tokens=2, max_batch_size=3, max_num_tokens=64)
    with mock.patch.object(engine.scheduler, "_preempt", wraps=engine.scheduler._preempt) as preempted:
        collector = serve(engine, requests)
    assert preempted.call_count > 0
    assert collector.tokens() == [case.pool.outputs[prompt] for prompt in (0, 9, 1)]


def test_prefix_cache_unless_model_has_state(case: Case) -> None:
    engine = engine_for(case.served_model, block_tokens=4, prefix_cache=True)
    first = serve(engine, [case.request(0, 0)])
    with mock.patch.object(engine.runner, "launch", wraps=engine.runner.launch) as launched:
        remaining = serve(engine, [case.request(number, number) for number in (1, 2, 3, 4, 5)])
    assert first.tokens() + remaining.tokens() == case.pool.outputs[:6]
    computed = sum(call.args[0].num_tokens for call in launched.call_args_list)
    needed = sum(len(case.pool.prompts[number]) + MAX_OUTPUT - 1 for number in (1, 2, 3, 4, 5))
    # Four share a prefix of 17 tokens, of which 16 are cached; the fourth shares 8.
    assert computed == needed - (0 if case.model is NEMOTRON else 4 * 16 + 8)


# -- Triton kernels


@pytest.fixture
def triton_everywhere(force_kernels: None) -> Iterator[None]:  # noqa: F811
    """Run Triton kernels in the interpreter wherever a GPU would; uninitialized memory is NaN."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled on a GPU: tests/gpu")
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new tensors with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize(
    "case", [MODELS[0], *(pytest.param(model, marks=pytest.mark.nightly) for model in MODELS[1:])], indirect=True
)
def test_triton_kernels_in_padded_steps(case: Case) -> None:
    engine = engine_for(case.served_model, max_num_tokens=12)
    captures_prefill = all(mixer.captures_prefill for mixer in case.served_model.mixers())
    sizes = (GraphSize(4, 4), GraphSize(4, 16, 3))[: 1 + captures_prefill]
    replays = EagerReplays.of(engine, *sizes)
    prompts = (8, 2, 4)
    requests = [replace(case.request(number, prompt), max_tokens=4) for number, prompt in enumerate(prompts)]
    assert serve(engine, requests).tokens() == [case.pool.outputs[prompt][:4] for prompt in prompts]
    assert set(replays.counts) == set(sizes)


# -- load


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_thousand_requests_with_random_cancels(prefix_cache: bool) -> None:
    draw = random.Random(5)
    engine = engine_for(
        served_model_for(config_of(LLAMA, None)),
        blocks=90,
        block_tokens=4,
        max_batch_size=32,
        max_num_tokens=96,
        prefix_cache=prefix_cache,
    )
    begin = [draw.randrange(97) for _ in range(12)]
    requests = []
    for number in range(1000):
        prompt = [*begin[: draw.choice((0, 5, 12))], *(draw.randrange(97) for _ in range(draw.randint(1, 12)))]
        requests.append(Request(request_id=number, prompt=prompt, max_tokens=draw.randint(1, 10)))
    arrivals = {number: number // 8 for number in range(1000)}
    cancels = {number: arrivals[number] + draw.randint(0, 30) for number in draw.sample(range(1000), 300)}
    collector = serve(engine, requests, arrivals, cancels)
    finishes = [collector.outputs[number].finish_reason for number in range(1000)]
    assert 30 < finishes.count("cancelled") < 300
    for request, finish in zip(requests, finishes, strict=True):
        if finish != "cancelled":
            assert finish == "length"
            assert len(collector.outputs[request.request_id].token_ids) == request.max_tokens
    check_idle(engine)
