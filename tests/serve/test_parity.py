"""Served answers equal those of `transformers`, token for token, however the engine comes to compute them: whatever is
beside them, in whatever chunks, again after preemption or from blocks of another prompt that begins alike."""

import importlib
import pkgutil
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_served import (
    ALONE,
    ANSWER,
    LLAMA,
    LONGEST,
    MODELS,
    NEMOTRON,
    EagerReplays,
    Pool,
    Scene,
    answered,
    check_idle,
    config_of,
    engine_for,
    play,
    scenes,
    serve,
    stack_of,
    written,
)
from triton_interpreter import interpreter  # noqa: F401  # a fixture

from llmb import ops
from llmb.config.spec import Model, RunConfig
from llmb.serve.engine_builder import open_engine
from llmb.serve.layers import served_mla
from llmb.serve.layers.served_model import Stack
from llmb.serve.request import Answer, Request

CLEAR = 1e-3  # what rounding could never turn round: it is near 1e-6 of logits near 1


@dataclass(frozen=True)
class Case:
    """A model as it is served, and what it has to answer."""

    config: RunConfig
    stack: Stack
    pool: Pool

    @property
    def model(self) -> Model:
        return self.config.model

    def request(self, number: int, prompt: int) -> Request:
        return Request(number=number, prompt=self.pool.prompts[prompt], max_tokens=ANSWER)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model: Model = request.param
    folder = written(model, tmp_path_factory.mktemp("weights") / model.name)
    config = config_of(model, folder)
    return Case(config, stack_of(config), answered(model, folder))


def test_the_reference_is_no_toss_up(case: Case) -> None:
    assert case.pool.margin > CLEAR
    answers = set(case.pool.answers)
    assert len(answers) > len(case.pool.prompts) // 2, "prompts matter"
    assert len({token for answer in answers for token in answer}) > 20, "answers are not one token over and over"


def test_an_engine_as_a_run_opens_it(case: Case) -> None:
    engine = open_engine(case.config, ALONE, LONGEST)
    heard = serve(engine, [case.request(number, number) for number in range(len(case.pool.prompts))])
    assert heard.tokens() == case.pool.answers


# -- every way to compute them


@settings(max_examples=30, deadline=None)
@given(scene=scenes(), expanded_from=st.sampled_from([2, served_mla.EXPANDED_FROM]))
def test_any_company_chunking_preemption_and_prefix(case: Case, scene: Scene, expanded_from: int) -> None:
    requests = [case.request(number, prompt) for number, prompt in enumerate(scene.prompts)]
    with mock.patch.object(served_mla, "EXPANDED_FROM", expanded_from):
        heard = play(case.stack, scene, requests)
    for number, (prompt, most) in enumerate(zip(scene.prompts, scene.max_tokens, strict=True)):
        check(heard.answers[number], case.pool.answers[prompt][:most])


def check(answer: Answer, wanted: tuple[int, ...]) -> None:
    if answer.finish == "cancelled":
        assert answer.tokens == wanted[: len(answer.tokens)]
    else:
        assert answer.tokens == wanted


# -- each of them for certain


def test_a_cache_for_one_makes_others_wait_and_begin_again(case: Case) -> None:
    """Two that together need more blocks than there are, whose end is not known ahead, are both admitted."""
    stop = ((case.model.vocab,),)  # never comes, but might for all the engine knows
    requests = [
        Request(number=number, prompt=case.pool.prompts[prompt], max_tokens=ANSWER, stop=stop)
        for number, prompt in enumerate((0, 9, 1))
    ]
    engine = engine_for(case.stack, blocks=20, block_tokens=2, max_batch_size=3, max_num_tokens=64)
    with mock.patch.object(engine.scheduler, "_preempt", wraps=engine.scheduler._preempt) as preempted:
        heard = serve(engine, requests)
    assert preempted.call_count > 0
    assert heard.tokens() == [case.pool.answers[prompt] for prompt in (0, 9, 1)]


def test_prompts_that_begin_alike_are_computed_once_unless_there_is_state(case: Case) -> None:
    engine = engine_for(case.stack, block_tokens=4, prefix_cache=True)
    first = serve(engine, [case.request(0, 0)])
    with mock.patch.object(engine.runner, "launch", wraps=engine.runner.launch) as launched:
        rest = serve(engine, [case.request(number, number) for number in (1, 2, 3, 4, 5)])
    assert first.tokens() + rest.tokens() == case.pool.answers[:6]
    computed = sum(call.args[0].tokens for call in launched.call_args_list)
    needed = sum(len(case.pool.prompts[number]) + ANSWER - 1 for number in (1, 2, 3, 4, 5))
    # Of the 17 tokens that four of them begin with, 16 are there; 8 of the fourth one's.
    assert computed == needed - (0 if case.model is NEMOTRON else 4 * 16 + 8)


# -- by the kernels of a GPU


@pytest.fixture
def triton_everywhere(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    """Triton's kernels, in its interpreter, wherever a GPU would take them; memory that nobody wrote is no number."""
    if torch.cuda.is_available():
        pytest.skip("there kernels are compiled, for its own tensors: tests/gpu")
    for module in pkgutil.walk_packages(ops.__path__, "llmb.ops."):
        if not module.name.endswith(("_triton", "dispatch")):
            found = importlib.import_module(module.name)
            if hasattr(found, "takes_triton"):
                monkeypatch.setattr(found, "takes_triton", lambda tensor: True)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_everywhere")
def test_kernels_of_a_gpu_in_padded_steps_give_the_same_answers(case: Case) -> None:
    engine = engine_for(case.stack, max_num_tokens=12)
    replays = EagerReplays.of(engine, size=4)
    prompts = (8, 2, 4)
    requests = [replace(case.request(number, prompt), max_tokens=4) for number, prompt in enumerate(prompts)]
    assert serve(engine, requests).tokens() == [case.pool.answers[prompt][:4] for prompt in prompts]
    assert replays.count > 0


# -- many


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_thousand_requests_with_random_cancels(prefix_cache: bool) -> None:
    draw = random.Random(5)
    engine = engine_for(
        stack_of(config_of(LLAMA, None)),
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
        requests.append(Request(number=number, prompt=prompt, max_tokens=draw.randint(1, 10)))
    arrivals = {number: number // 8 for number in range(1000)}
    cancels = {number: arrivals[number] + draw.randint(0, 30) for number in draw.sample(range(1000), 300)}
    heard = serve(engine, requests, arrivals, cancels)
    finishes = [heard.answers[number].finish for number in range(1000)]
    assert 30 < finishes.count("cancelled") < 300
    for request, finish in zip(requests, finishes, strict=True):
        if finish != "cancelled":
            assert finish == "length"
            assert len(heard.answers[request.number].tokens) == request.max_tokens
    check_idle(engine)
