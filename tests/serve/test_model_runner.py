"""Steps on a device: padding as in a CUDA graph, empty ones in between and tokens not read yet change nothing."""

from collections.abc import Callable

import pytest
import torch
from small_served import ANSWER, MODELS, EagerReplays, config_of, engine_for, prompts_for, serve, stack_of

from llmb.serve.decode_graphs import graph_sizes
from llmb.serve.engine import Engine
from llmb.serve.layers.served_model import Stack
from llmb.serve.model_runner import drawn
from llmb.serve.request import Request, Sampling, Sequence
from llmb.serve.sampler import uniform
from llmb.serve.step_batch import Part, Plan


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def stack(request: pytest.FixtureRequest) -> Stack:
    return stack_of(config_of(request.param, None))


def requests_for(stack: Stack) -> list[Request]:
    """Two of three are drawn: so answers differ though the weights are small."""
    return [
        Request(number=n, prompt=prompt, max_tokens=ANSWER, sampling=Sampling(temperature=0.5 * (n % 3), seed=n))
        for n, prompt in enumerate(prompts_for(stack.model.vocab))
    ]


def answers(stack: Stack, change: Callable[[Engine], Engine | None] = lambda engine: None) -> list[tuple[int, ...]]:
    engine = engine_for(stack, max_num_tokens=24)
    return serve(change(engine) or engine, requests_for(stack)).tokens()


def test_padded_steps_give_the_same_answers(stack: Stack) -> None:
    engine = engine_for(stack, max_num_tokens=24)
    replays = EagerReplays.of(engine, size=4)
    assert serve(engine, requests_for(stack)).tokens() == answers(stack)
    assert replays.count > ANSWER


def test_empty_steps_in_between_change_nothing(stack: Stack) -> None:
    def with_company(engine: Engine) -> None:
        launch = engine.runner.launch

        def twice(plan: Plan) -> object:
            assert launch(Plan()).tokens() == []
            return launch(plan)

        engine.runner.launch = twice  # type: ignore[assignment, method-assign]

    assert answers(stack, with_company) == answers(stack)


@pytest.mark.parametrize("depth", [0, 2])
def test_how_many_steps_stay_unread_changes_nothing(stack: Stack, depth: int) -> None:
    assert answers(stack, lambda engine: Engine(engine.scheduler, engine.runner, depth=depth)) == answers(stack)


def test_a_draw_follows_from_the_request_and_the_place_in_its_answer() -> None:
    """The fourth token of an answer: generated, or computed anew with all before it, in another slot."""
    sampling = Sampling(temperature=1.0, seed=11)
    request = Request(number=5, prompt=[1, 2, 3], max_tokens=9, sampling=sampling)
    parts = [
        Part(Sequence(request=request, tokens=[1, 2, 3, 4, 5], pending=1, slot=2), 5, 1, True),
        Part(Sequence(request=request, tokens=[1, 2, 3, 4, 5, 6], slot=0), 0, 6, True),
        Part(Sequence(request=request, tokens=[1, 2, 3, 4, 5, 6], slot=1), 4, 2, True),
    ]
    flat_SV = torch.zeros(3, 1000)  # so that the token tells the draw
    assert drawn(flat_SV, parts).tolist() == [int(uniform(11, 3) * 1000)] * 3


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 100, 384, 2048])
def test_graph_sizes_reach_the_batch_limit_and_waste_little(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[-1] == most
    assert sorted(set(sizes)) == list(sizes)
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size >= batch)
        assert size <= max(2 * batch, 1.25 * batch + 16)
    assert len(sizes) < 30
