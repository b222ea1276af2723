"""Padding as in CUDA graphs, empty steps and pending tokens change no output."""

from collections.abc import Callable

import pytest
import torch
from small_served import MAX_OUTPUT, MODELS, EagerReplays, config_of, engine_for, prompts_for, serve, served_model_for

from llmb.ops.gemm.skinny_gemm import MAX_TOKENS
from llmb.perfmodel.serving_time.native_step import SKINNY_TOKENS
from llmb.serve.engine import Engine
from llmb.serve.layers.served_model import ServedModel
from llmb.serve.model_runner import sample_with_params
from llmb.serve.request import Request, SamplingParams, Sequence
from llmb.serve.sampler import uniform
from llmb.serve.step_batch import ScheduledChunk, StepBatch
from llmb.serve.step_graphs import BatchSize, GraphSize, decode_sizes, mixed_sizes


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
    replays = EagerReplays.of(engine, GraphSize(4, 4))
    assert serve(engine, requests_for(served_model)).tokens() == outputs(served_model)
    assert replays.counts.total() > MAX_OUTPUT


@pytest.mark.slow
def test_padded_mixed_steps_give_the_same_outputs(served_model: ServedModel) -> None:
    if not all(mixer.captures_prefill for mixer in served_model.mixers()):
        pytest.skip("its prefill chunks are not captured")
    engine = engine_for(served_model, max_num_tokens=24)
    small, large = GraphSize(2, 16, 3), GraphSize(4, 32, 3)
    replays = EagerReplays.of(engine, small, large, GraphSize(4, 4))
    assert serve(engine, requests_for(served_model)).tokens() == outputs(served_model)
    assert min(replays.counts[small], replays.counts[large]) > 1


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
@pytest.mark.parametrize("depth", [0, pytest.param(2, marks=pytest.mark.nightly)])
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


def test_predictor_knows_how_many_tokens_skinny_gemms_take() -> None:
    assert SKINNY_TOKENS == MAX_TOKENS


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 100, 384, 2048])
def test_decode_sizes_reach_the_batch_limit_with_little_padding(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes[-1] == GraphSize(most, most)
    assert sorted(set(sizes)) == list(sizes)
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size.fits(BatchSize(batch, batch)))
        assert size.num_decodes <= max(2 * batch, 1.25 * batch + 16)
    assert len(sizes) < 30


@pytest.mark.parametrize(("slots", "budget"), [(1, 8192), (12, 256), (256, 8192), (300, 1000), (1024, 2048)])
def test_mixed_sizes_reach_their_limits_with_little_padding(slots: int, budget: int) -> None:
    sizes = sorted(mixed_sizes(slots, budget))
    assert all(size.num_decodes <= size.num_tokens <= budget for size in sizes)
    largest = max(size.num_tokens for size in sizes)
    for decodes in range(0, slots, 7):
        for tokens in range(decodes + 2, largest + 1, 13):
            size = next(size for size in sizes if size.fits(BatchSize(decodes, tokens, 2)))
            assert size.num_tokens <= max(128, 4 * decodes, 1.25 * tokens + 64)
    assert not any(size.fits(BatchSize(1, 1)) for size in sizes)
    assert len(sizes) < 100
