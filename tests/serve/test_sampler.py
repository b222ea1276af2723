"""Drawn tokens have the probabilities that the settings leave them, and an answer follows from its seed alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_served import (
    ANSWER,
    LLAMA,
    PROMPTS,
    Scene,
    config_of,
    engine_for,
    play,
    prompts_for,
    scenes,
    serve,
    stack_of,
    written,
)
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from llmb.serve.layers.served_model import Stack
from llmb.serve.request import Request, Sampling
from llmb.serve.sampler import greedy, sample, uniform

VOCAB = 12


def probabilities(logits_V: Tensor, how: Sampling) -> Tensor:
    """As `transformers` narrows logits down."""
    scores_1V = TemperatureLogitsWarper(how.temperature)(None, logits_V[None].double())
    if how.top_k:
        scores_1V = TopKLogitsWarper(how.top_k)(None, scores_1V)
    if how.top_p < 1:
        scores_1V = TopPLogitsWarper(how.top_p)(None, scores_1V)
    return scores_1V[0].softmax(dim=-1)


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.floats(0.05, 1.0),
)
rows = st.integers(0, 10_000).map(lambda seed: torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2)


@given(logits_V=rows, how=samplings)
def test_evenly_spread_draws_meet_each_token_by_its_probability(logits_V: Tensor, how: Sampling) -> None:
    count = 2000
    draws = [(place + 0.5) / count for place in range(count)]
    drawn = sample(logits_V.expand(count, -1), [how] * count, draws)
    met_V = torch.bincount(drawn, minlength=VOCAB)
    assert (met_V - probabilities(logits_V, how) * count).abs().max() < 1.1


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, top_k=5),
        Sampling(temperature=2.0, top_p=0.8),
        Sampling(temperature=1.5, top_k=8, top_p=0.9),
    ],
)
def test_draws_of_seeds_and_places_are_as_good_as_chance(how: Sampling) -> None:
    logits_V = torch.linspace(0.0, 3.0, VOCAB)
    count = 20_000
    draws = [uniform(seed, place) for seed in range(200) for place in range(100)]
    met_V = torch.bincount(sample(logits_V.expand(count, -1), [how] * count, draws), minlength=VOCAB)
    share_V = probabilities(logits_V, how)
    possible = share_V > 0
    assert not met_V[~possible].any()
    wanted_V = share_V[possible] * count
    chi_square = ((met_V[possible] - wanted_V) ** 2 / wanted_V).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations; the seeds are fixed


def test_draws_differ_by_seed_and_by_place_and_are_the_same_everywhere() -> None:
    draws = {uniform(seed, place) for seed in range(-50, 50) for place in range(50)}
    assert len(draws) == 5000
    assert 0 <= min(draws) < 0.001
    assert 0.999 < max(draws) < 1
    assert uniform(2**64 + 3, 1) == uniform(3, 1)
    assert (uniform(0, 0), uniform(1, 2)) == (0.5079605879681605, 0.0945289813339284)


@given(st.lists(st.tuples(rows, samplings, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=6))
def test_a_row_is_drawn_as_if_it_were_alone(some: list[tuple[Tensor, Sampling, float]]) -> None:
    logits, hows, draws = zip(*some, strict=True)
    alone = [sample(row[None], [how], [draw]).item() for row, how, draw in some]
    assert sample(torch.stack(logits), hows, draws).tolist() == alone


@given(logits_V=rows, draw=st.floats(0, 1, exclude_max=True))
def test_nothing_is_left_to_chance_where_one_token_is_left(logits_V: Tensor, draw: float) -> None:
    hows = [
        Sampling(),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=0.0),
        Sampling(temperature=1e-9),
        Sampling(temperature=5.0),
    ]
    drawn = sample(logits_V.expand(len(hows), -1), hows, [draw] * len(hows)).tolist()
    assert drawn[:-1] == [greedy(logits_V).item()] * 4
    assert 0 <= drawn[-1] < VOCAB


def test_a_draw_next_to_one_stays_among_what_is_kept() -> None:
    logits_V = torch.tensor([3.0, 2.0, 1.0, 0.0, -40.0])
    how = Sampling(temperature=1.0, top_k=3)
    assert sample(logits_V[None], [how], [1 - 2**-53]).tolist() == [2]


# -- through the engine


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    folder: Path = tmp_path_factory.mktemp("weights") / "llama"
    return stack_of(config_of(LLAMA, written(LLAMA, folder)))


def drawn_request(number: int, prompt: list[int], seed: int) -> Request:
    narrow = {"top_k": 20, "top_p": 0.9} if seed % 2 else {}
    how = Sampling(temperature=(0.0, 0.7, 1.3)[seed % 3], seed=seed, **narrow)
    return Request(number=number, prompt=prompt, max_tokens=ANSWER, sampling=how)


@pytest.fixture(scope="module")
def alone(stack: Stack) -> list[tuple[int, ...]]:
    """What each prompt of the pool is answered by itself; the seed is its place."""
    engine = engine_for(stack)
    return [
        serve(engine, [drawn_request(0, prompt, seed)]).tokens()[0]
        for seed, prompt in enumerate(prompts_for(LLAMA.vocab))
    ]


def test_other_seeds_give_other_answers_and_equal_ones_the_same(stack: Stack, alone: list[tuple[int, ...]]) -> None:
    prompt = prompts_for(LLAMA.vocab)[1]
    answers = serve(engine_for(stack), [drawn_request(number, prompt, number % 20) for number in range(40)]).tokens()
    assert answers[:20] == answers[20:]
    assert answers[1] == alone[1]
    assert len({answers[number] for number in range(20) if number % 3}) == 13  # those of which chance decides
    assert len({answers[number] for number in range(20) if number % 3 == 0}) == 1


@settings(max_examples=25, deadline=None)
@given(scene=scenes())
def test_company_chunks_and_preemption_change_no_draw(stack: Stack, alone: list[tuple[int, ...]], scene: Scene) -> None:
    pool = prompts_for(LLAMA.vocab)
    assert len(pool) == PROMPTS
    requests = [drawn_request(number, pool[place], seed=place) for number, place in enumerate(scene.prompts)]
    heard = play(stack, replace(scene, cancels={}), requests)
    wanted = [alone[place][:most] for place, most in zip(scene.prompts, scene.max_tokens, strict=True)]
    assert heard.tokens() == wanted


def test_an_answer_ends_with_its_stop_sequence_or_end_token(stack: Stack) -> None:
    pool = [Request(number=n, prompt=prompt, max_tokens=ANSWER) for n, prompt in enumerate(prompts_for(LLAMA.vocab))]
    answers = serve(engine_for(stack), pool).tokens()
    # One in which each token tells its place.
    prompt, whole = next((r.prompt, a) for r, a in zip(pool, answers, strict=True) if len(set(a)) == ANSWER)
    plain = Request(number=0, prompt=prompt, max_tokens=ANSWER)
    end = frozenset({whole[6], LLAMA.vocab - 1})
    requests = [
        plain,
        replace(plain, number=1, stop=(whole[3:5],)),
        replace(plain, number=2, stop=((whole[3], whole[5]), whole[7:9])),
        replace(plain, number=3, eos=end),
        replace(plain, number=4, eos=end, ignore_eos=True),
        replace(plain, number=5, eos=end, stop=(whole[2:4],)),
        replace(plain, number=6, stop=((prompt[-1], whole[0]),)),
    ]
    heard = serve(engine_for(stack, max_batch_size=3), requests)
    assert [len(tokens) for tokens in heard.tokens()] == [ANSWER, 5, 9, 7, ANSWER, 4, ANSWER]
    assert all(tokens == whole[: len(tokens)] for tokens in heard.tokens())
    finishes = ["length", "stop", "stop", "stop", "length", "stop", "length"]
    assert [heard.answers[number].finish for number in range(7)] == finishes
