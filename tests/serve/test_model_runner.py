"""Padding as in CUDA graphs, empty steps and pending tokens change no output."""

from collections.abc import Callable

import pytest
import torch
from small_served import MAX_OUTPUT, MODELS, EagerReplays, config_of, engine_for, prompts_for, serve, served_model_for

from llmb.serve.decode_graphs import capture_sizes
from llmb.serve.engine import Engine
from llmb.serve.layers.served_model import ServedModel
from llmb.serve.model_runner import sample_with_params
from llmb.serve.request import Request, SamplingParams, Sequence
from llmb.serve.sampler import uniform
from llmb.serve.step_batch import ScheduledChunk, StepBatch


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def served_model(request: pytest.FixtureRequest) -> ServedModel:
    return served_model_for(config_of(request.param, None))


def requests_for(served_model: ServedModel) -> list[Request]:
    """Return requests, two of three with a temperature, so that outputs differ though the weights are small."""
    return [
        Request(
            request_id=n,
            prompt=prompt,
            max_tokens=MAX_OUTPUT,
            sampling_params=SamplingParams(temperature=0.5 * (n % 3), seed=n),
        )
        for n, prompt in enumerate(prompts_for(served_model.spec.vocab))
    ]


def outputs(
    served_model: ServedModel, change: Callable[[Engine], Engine | None] = lambda engine: None
) -> list[tuple[int, ...]]:
    engine = engine_for(served_model, max_num_tokens=24)
    return serve(change(engine) or engine, requests_for(served_model)).tokens()


@pytest.mark.slow
def test_padded_steps_give_the_same_outputs(served_model: ServedModel) -> None:
    engine = engine_for(served_model, max_num_tokens=24)
    replays = EagerReplays.of(engine, size=4)
    assert serve(engine, requests_for(served_model)).tokens() == outputs(served_model)
    assert replays.count > MAX_OUTPUT


@pytest.mark.slow
def test_empty_steps_change_no_output(served_model: ServedModel) -> None:
    def with_company(engine: Engine) -> None:
        launch = engine.runner.launch

        def twice(batch: StepBatch) -> object:
            assert launch(StepBatch()).tokens() == []
            return launch(batch)

        engine.runner.launch = twice  # type: ignore[assignment, method-assign]

    assert outputs(served_model, with_company) == outputs(served_model)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
def test_depth_changes_no_output(served_model: ServedModel, depth: int) -> None:
    assert outputs(served_model, lambda engine: Engine(engine.scheduler, engine.runner, depth=depth)) == outputs(
        served_model
    )


def test_sample_depends_only_on_seed_and_output_position() -> None:
    """The fourth output token: decoded, or recomputed with all tokens before it, in another slot."""
    sampling = SamplingParams(temperature=1.0, seed=11)
    request = Request(request_id=5, prompt=[1, 2, 3], max_tokens=9, sampling_params=sampling)
    chunks = [
        ScheduledChunk(Sequence(request=request, token_ids=[1, 2, 3, 4, 5], num_pending_tokens=1, slot=2), 5, 1, True),
        ScheduledChunk(Sequence(request=request, token_ids=[1, 2, 3, 4, 5, 6], slot=0), 0, 6, True),
        ScheduledChunk(Sequence(request=request, token_ids=[1, 2, 3, 4, 5, 6], slot=1), 4, 2, True),
    ]
    flat_SV = torch.zeros(3, 1000)  # so that the token shows the draw
    assert sample_with_params(flat_SV, chunks).tolist() == [int(uniform(11, 3) * 1000)] * 3


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 100, 384, 2048])
def test_capture_sizes_reach_the_batch_limit_with_little_padding(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes[-1] == most
    assert sorted(set(sizes)) == list(sizes)
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size >= batch)
        assert size <= max(2 * batch, 1.25 * batch + 16)
    assert len(sizes) < 30
