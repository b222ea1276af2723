"""Sampled tokens have the probabilities of `transformers`, and an output depends only on its seed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_served import (
    LLAMA,
    MAX_OUTPUT,
    PROMPTS,
    Scenario,
    config_of,
    engine_for,
    prompts_for,
    run_scenario,
    scenarios,
    serve,
    served_model_for,
    write_weights,
)
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from llmb.serve.layers.served_model import ServedModel
from llmb.serve.request import Request, SamplingParams, TokenLogprobs
from llmb.serve.sampler import compute_logprobs, greedy, sample, uniform

VOCAB = 12


def probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities by the logits warpers of `transformers`."""
    scores_1V = TemperatureLogitsWarper(params.temperature)(None, logits_V[None].double())
    if params.top_k:
        scores_1V = TopKLogitsWarper(params.top_k)(None, scores_1V)
    if params.top_p < 1:
        scores_1V = TopPLogitsWarper(params.top_p)(None, scores_1V)
    return scores_1V[0].softmax(dim=-1)


params_strategy = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.floats(0.05, 1.0),
)
rows = st.integers(0, 10_000).map(lambda seed: torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2)


@pytest.mark.slow
@given(logits_V=rows, params=params_strategy)
def test_even_draws_match_probabilities(logits_V: Tensor, params: SamplingParams) -> None:
    count = 2000
    draws = [(place + 0.5) / count for place in range(count)]
    sampled = sample(logits_V.expand(count, -1), [params] * count, draws)
    met_V = torch.bincount(sampled, minlength=VOCAB)
    assert (met_V - probabilities(logits_V, params) * count).abs().max() < 1.1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=5),
        SamplingParams(temperature=2.0, top_p=0.8),
        SamplingParams(temperature=1.5, top_k=8, top_p=0.9),
    ],
)
def test_seeded_draws_pass_chi_square(params: SamplingParams) -> None:
    logits_V = torch.linspace(0.0, 3.0, VOCAB)
    count = 20_000
    draws = [uniform(seed, place) for seed in range(200) for place in range(100)]
    met_V = torch.bincount(sample(logits_V.expand(count, -1), [params] * count, draws), minlength=VOCAB)
    share_V = probabilities(logits_V, params)
    possible = share_V > 0
    assert not met_V[~possible].any()
    expected_V = share_V[possible] * count
    chi_square = ((met_V[possible] - expected_V) ** 2 / expected_V).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations; the seeds are fixed


def test_uniform_is_distinct_and_reproducible() -> None:
    draws = {uniform(seed, place) for seed in range(-50, 50) for place in range(50)}
    assert len(draws) == 5000
    assert 0 <= min(draws) < 0.001
    assert 0.999 < max(draws) < 1
    assert uniform(2**64 + 3, 1) == uniform(3, 1)
    assert (uniform(0, 0), uniform(1, 2)) == (0.5079605879681605, 0.0945289813339284)


@given(st.lists(st.tuples(rows, params_strategy, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=6))
def test_sample_is_batch_invariant(some: list[tuple[Tensor, SamplingParams, float]]) -> None:
    logits, params_list, draws = zip(*some, strict=True)
    alone = [sample(row[None], [params], [draw]).item() for row, params, draw in some]
    assert sample(torch.stack(logits), params_list, draws).tolist() == alone


@given(logits_V=rows, draw=st.floats(0, 1, exclude_max=True))
def test_single_candidate_is_deterministic(logits_V: Tensor, draw: float) -> None:
    params_list = [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=5.0),
    ]
    sampled = sample(logits_V.expand(len(params_list), -1), params_list, [draw] * len(params_list)).tolist()
    assert sampled[:-1] == [greedy(logits_V).item()] * 4
    assert 0 <= sampled[-1] < VOCAB


def test_draw_near_one_stays_within_top_k() -> None:
    logits_V = torch.tensor([3.0, 2.0, 1.0, 0.0, -40.0])
    params = SamplingParams(temperature=1.0, top_k=3)
    assert sample(logits_V[None], [params], [1 - 2**-53]).tolist() == [2]


# -- through the engine


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = tmp_path_factory.mktemp("weights") / "llama"
    return served_model_for(config_of(LLAMA, write_weights(LLAMA, folder)))


def drawn_request(number: int, prompt: list[int], seed: int) -> Request:
    narrow = {"top_k": 20, "top_p": 0.9} if seed % 2 else {}
    params = SamplingParams(temperature=(0.0, 0.7, 1.3)[seed % 3], seed=seed, **narrow)
    return Request(request_id=number, prompt=prompt, max_tokens=MAX_OUTPUT, sampling_params=params)


@pytest.fixture(scope="module")
def alone(served_model: ServedModel) -> list[tuple[int, ...]]:
    """Outputs of each prompt of the pool alone; the seed is its index."""
    engine = engine_for(served_model)
    return [
        serve(engine, [drawn_request(0, prompt, seed)]).tokens()[0]
        for seed, prompt in enumerate(prompts_for(LLAMA.vocab))
    ]


@pytest.mark.slow
def test_outputs_depend_on_seed(served_model: ServedModel, alone: list[tuple[int, ...]]) -> None:
    prompt = prompts_for(LLAMA.vocab)[1]
    outputs = serve(
        engine_for(served_model), [drawn_request(number, prompt, number % 20) for number in range(40)]
    ).tokens()
    assert outputs[:20] == outputs[20:]
    assert outputs[1] == alone[1]
    assert len({outputs[number] for number in range(20) if number % 3}) == 13  # those with a temperature
    assert len({outputs[number] for number in range(20) if number % 3 == 0}) == 1


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(scenario=scenarios())
def test_sampled_outputs_do_not_depend_on_batching(
    served_model: ServedModel, alone: list[tuple[int, ...]], scenario: Scenario
) -> None:
    pool = prompts_for(LLAMA.vocab)
    assert len(pool) == PROMPTS
    requests = [drawn_request(number, pool[place], seed=place) for number, place in enumerate(scenario.prompts)]
    collector = run_scenario(served_model, replace(scenario, cancels={}), requests)
    expected = [alone[place][:most] for place, most in zip(scenario.prompts, scenario.max_tokens, strict=True)]
    assert collector.tokens() == expected


def test_outputs_end_with_stop_sequence_or_eos(served_model: ServedModel) -> None:
    pool = [
        Request(request_id=n, prompt=prompt, max_tokens=MAX_OUTPUT) for n, prompt in enumerate(prompts_for(LLAMA.vocab))
    ]
    outputs = serve(engine_for(served_model), pool).tokens()
    # An output without repeated tokens.
    prompt, whole = next((r.prompt, a) for r, a in zip(pool, outputs, strict=True) if len(set(a)) == MAX_OUTPUT)
    plain = Request(request_id=0, prompt=prompt, max_tokens=MAX_OUTPUT)
    end = frozenset({whole[6], LLAMA.vocab - 1})
    requests = [
        plain,
        replace(plain, request_id=1, stop=(whole[3:5],)),
        replace(plain, request_id=2, stop=((whole[3], whole[5]), whole[7:9])),
        replace(plain, request_id=3, eos=end),
        replace(plain, request_id=4, eos=end, ignore_eos=True),
        replace(plain, request_id=5, eos=end, stop=(whole[2:4],)),
        replace(plain, request_id=6, stop=((prompt[-1], whole[0]),)),
    ]
    collector = serve(engine_for(served_model, max_batch_size=3), requests)
    assert [len(tokens) for tokens in collector.tokens()] == [MAX_OUTPUT, 5, 9, 7, MAX_OUTPUT, 4, MAX_OUTPUT]
    assert all(tokens == whole[: len(tokens)] for tokens in collector.tokens())
    finishes = ["length", "stop", "stop", "stop", "length", "stop", "length"]
    assert [collector.outputs[number].finish_reason for number in range(7)] == finishes


def test_logprobs_are_those_of_the_rows_that_ask():
    logits_SV = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    tokens_S = torch.tensor([3, 0, 8, 1])
    params = [SamplingParams(), SamplingParams(logprobs=2), SamplingParams(temperature=0.5), SamplingParams(logprobs=0)]
    rows = compute_logprobs(logits_SV, tokens_S, params)
    expected_SV = logits_SV.log_softmax(dim=-1)
    entries = rows.to_host().read()
    assert sorted(entries) == [1, 3]
    assert entries[1].logprob == pytest.approx(expected_SV[1, 0].item())
    assert entries[1].top == tuple(
        (int(i), pytest.approx(expected_SV[1, i].item())) for i in expected_SV[1].topk(2).indices
    )
    assert entries[3] == TokenLogprobs(pytest.approx(expected_SV[3, 1].item()))
    assert compute_logprobs(logits_SV, tokens_S, [SamplingParams()] * 4) is None
