"""Speculative decoding: outputs equal those without drafts, whatever is accepted; forced acceptance reaches its mean.

The draft is the first layers of the target, with the same weights: it often guesses right, and often not."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from output_collector import OutputCollector
from small_served import (
    LLAMA,
    MAX_OUTPUT,
    MAX_SEQ_LEN,
    SINGLE_RANK_INFO,
    EagerReplays,
    config_of,
    prompts_for,
    serve,
    write_weights,
)
from small_serving import CONFIG, Served, served
from triton_interpreter import force_kernels, interpreter  # noqa: F401  # fixtures

from llmb.config.native.speculation import with_draft
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.serve.admission import AdmissionCheck
from llmb.serve.engine import Engine
from llmb.serve.engine_builder import build_engine
from llmb.serve.request import Request, SamplingParams, Sequence
from llmb.serve.speculative.speculative_runner import SpeculativeRunner
from llmb.serve.step_batch import ScheduledChunk, StepBatch
from llmb.serve.step_graphs import GraphSize, StepGraphs

TARGET = replace(LLAMA, layers=3)
LIMITS = {"max_batch_size": 4, "max_num_tokens": 80, "block_tokens": 4}  # rejected tokens often span two blocks


def engine_of(config: RunConfig, **settings: Any) -> Engine:
    config = replace(config, workload=replace(config.workload, **{**LIMITS, **settings}))
    return build_engine(with_draft(config), SINGLE_RANK_INFO, MAX_SEQ_LEN)


def drafting(layers: int, drafts: int, **settings: Any) -> dict[str, Any]:
    return {"speculative_tokens": drafts, "draft": f"layers:{layers}", **settings}


def runner_of(engine: Engine) -> SpeculativeRunner:
    assert isinstance(engine.runner, SpeculativeRunner)
    return engine.runner


def requests(**changes: Any) -> list[Request]:
    """Return prompts of many lengths, whose outputs have 1 to 12 tokens: often fewer than there are drafts."""
    prompts = prompts_for(TARGET.vocab)
    return [
        Request(request_id=number, prompt=prompt, max_tokens=1 + (5 * number) % MAX_OUTPUT, **changes)
        for number, prompt in enumerate(prompts)
    ]


def outputs(collector: OutputCollector) -> list[tuple[tuple[int, ...], str]]:
    return [(output.token_ids, output.finish_reason) for _, output in sorted(collector.outputs.items())]


@pytest.fixture(scope="module")
def plain() -> list[tuple[tuple[int, ...], str]]:
    return outputs(serve(engine_of(config_of(TARGET, None)), requests()))


@pytest.mark.parametrize(
    ("layers", "drafts", "settings"),
    [
        (1, 1, {}),
        (1, 3, {}),
        (2, 5, {}),
        (2, 3, {"max_num_tokens": 30}),  # prompts in chunks, beside verifications
        (1, 4, {"prefix_cache": True, "block_tokens": 2}),
        (2, 4, {"max_batch_size": 1}),
    ],
)
def test_output_equals_greedy_decoding(plain, layers: int, drafts: int, settings: dict[str, Any]) -> None:
    engine = engine_of(config_of(TARGET, None), **drafting(layers, drafts, **settings))
    assert outputs(serve(engine, requests())) == plain
    counts = runner_of(engine).counts
    assert 0 < sum(counts.accepted) < sum(counts.trials)
    assert counts.trials[0] == counts.verifications
    compared = zip(counts.trials[1:], counts.accepted, strict=False)
    assert all(trials <= accepted for trials, accepted in compared)  # only if all before it stand


def test_draft_that_is_the_target_is_always_accepted(plain) -> None:
    """So its cache lacks no token, however many were accepted before, and whatever was preempted."""
    work = replace(CONFIG.workload, **LIMITS, **drafting(3, 3), draft_model=TARGET)
    engine = build_engine(replace(config_of(TARGET, None), workload=work), SINGLE_RANK_INFO, MAX_SEQ_LEN)
    assert outputs(serve(engine, requests())) == plain
    counts = runner_of(engine).counts
    assert counts.accepted == counts.trials
    assert min(counts.trials) > 0


def test_preempted_sequences_are_drafted_again(plain) -> None:
    engine = engine_of(config_of(TARGET, None), **drafting(2, 3))
    pool = engine.scheduler.pool
    held = [pool.allocate() for _ in range(pool.num_blocks - 18)]  # the longest request takes 15
    collector = OutputCollector()
    for request in requests():
        engine.submit(collector.listen(request))
    engine.scheduler._admit = _admit_all(engine)  # type: ignore[method-assign]
    engine.drain()
    assert outputs(collector) == plain
    assert engine.scheduler.num_preemptions > 0
    pool.release(held)


def _admit_all(engine: Engine):
    """Admit whatever has a slot and blocks now, so that some must be preempted."""
    admit = engine.scheduler._admit

    def admit_all(chunks):
        with mock.patch.object(AdmissionCheck, "try_admit", return_value=True):
            admit(chunks)

    return admit_all


def test_end_of_sequence_among_accepted_tokens_ends_the_output(plain) -> None:
    """Every token of the plain outputs in turn ends them, so also the first, middle and last of a verification."""
    for eos in sorted({token for tokens, _ in plain for token in tokens})[::7]:
        ends = {"eos": frozenset([eos]), "stop": ((eos, eos),)}
        expected = outputs(serve(engine_of(config_of(TARGET, None)), requests(**ends)))
        engine = engine_of(config_of(TARGET, None), **drafting(2, 4))
        assert outputs(serve(engine, requests(**ends))) == expected


def test_padded_steps_give_the_same_outputs() -> None:
    """As CUDA graphs compute them: rows of padding beside those of drafts, in both models."""
    long = [Request(request_id=number, prompt=[number, 3, 5], max_tokens=40 - number) for number in range(3)]
    expected = outputs(serve(engine_of(config_of(TARGET, None)), long))
    engine = engine_of(config_of(TARGET, None), **drafting(2, 3))
    runner = runner_of(engine)
    replays = []
    for model_runner, rows in ((runner.target, 16), (runner.draft, 8)):
        replays.append(EagerReplays(model_runner, (GraphSize(rows, rows),)))
        model_runner.graphs = replays[-1]  # type: ignore[assignment]
    assert outputs(serve(engine, long)) == expected
    assert all(replay.counts.total() > 5 for replay in replays)


@pytest.mark.nightly
@pytest.mark.usefixtures("force_kernels")
def test_triton_kernels_read_the_keys_of_other_rows() -> None:
    """In the interpreter: a draft sees the drafts before it, whose keys the same step has written."""
    short = [Request(request_id=number, prompt=[number, 3, 5] * 3, max_tokens=8) for number in range(2)]
    expected = outputs(serve(engine_of(config_of(TARGET, None), block_tokens=16), short))
    engine = engine_of(config_of(TARGET, None), **drafting(2, 3, block_tokens=16))
    assert outputs(serve(engine, short)) == expected
    assert sum(runner_of(engine).counts.accepted) > 0


def test_rows_of_one_sequence_take_no_graph_whose_attention_writes_the_cache() -> None:
    sizes = [GraphSize(1, 1), GraphSize(2, 2), GraphSize(4, 4)]
    graphs = StepGraphs(mock.Mock(), mock.Mock(), MAX_SEQ_LEN, torch.zeros(1), ())
    graphs._sizes, graphs._captured = sizes, {size: mock.Mock(output=size) for size in sizes}  # type: ignore[misc]
    sequence = Sequence(request=requests()[0], token_ids=[1, 2, 3], slot=0)
    rows = [ScheduledChunk(sequence, 2 + draft, 1, True, draft) for draft in range(2)]
    assert graphs.launch(StepBatch(rows)) == GraphSize(2, 2)
    assert graphs.launch(StepBatch(rows, repeats_sequences=True)) == GraphSize(4, 4)


@pytest.mark.slow
def test_drafts_take_the_weights_of_their_folder_or_of_the_model(tmp_path) -> None:
    target, draft = (
        write_weights(replace(LLAMA, layers=layers), tmp_path / str(layers), scale)
        for layers, scale in ((2, 0.2), (1, 0.1))
    )
    config = config_of(replace(LLAMA, layers=2), target)
    expected = outputs(serve(engine_of(config), requests()))
    for source in (str(draft), "layers:1"):
        engine = engine_of(config, speculative_tokens=2, draft=source)
        assert outputs(serve(engine, requests())) == expected
        assert runner_of(engine).draft.model.spec.layers == 1


def test_forced_acceptance_reaches_its_mean_and_depends_on_no_batch() -> None:
    probabilities = (0.9, 0.6, 0.3)
    long = [Request(request_id=number, prompt=[1 + number], max_tokens=60) for number in range(8)]
    tokens = []
    for batch in (1, 4):
        settings = drafting(1, 3, draft_acceptance=probabilities, max_batch_size=batch)
        engine = engine_of(config_of(TARGET, None), **settings)
        tokens.append(serve(engine, long).tokens())
        counts = runner_of(engine).counts
        for accepted, trials, probability in zip(counts.accepted, counts.trials, probabilities, strict=True):
            assert accepted / trials == pytest.approx(probability, abs=3 * (0.25 / trials) ** 0.5)
    assert tokens[0] == tokens[1]
    assert all(len(output) == 60 for output in tokens[0])


@pytest.mark.parametrize(("probability", "per_step"), [(0.0, 1), (1.0, 4)])
def test_drafts_that_are_never_or_always_accepted(plain, probability: float, per_step: int) -> None:
    engine = engine_of(config_of(TARGET, None), **drafting(1, 3, draft_acceptance=(probability,) * 3))
    request = Request(request_id=0, prompt=[5, 6, 7], max_tokens=41)  # the first token comes with the prompt
    serve(engine, [request])
    counts = runner_of(engine).counts
    verified = 40 // per_step
    assert counts.verifications == verified - (per_step == 1)  # the last token alone has no draft
    if probability == 0:
        assert outputs(serve(engine, requests())) == plain


def test_sampling_is_refused() -> None:
    engine = engine_of(config_of(TARGET, None), **drafting(1, 2))
    for params, message in (
        (SamplingParams(temperature=0.7), "temperature 0.7"),
        (SamplingParams(logprobs=2), "log probabilities"),
    ):
        with pytest.raises(ConfigError, match=f"{message}: speculative decoding is greedy"):
            engine.submit(Request(request_id=0, prompt=[1], max_tokens=2, sampling_params=params))


@pytest.mark.slow
def test_run_records_acceptance_and_speed_up(tmp_path) -> None:
    model = replace(CONFIG.model, layers=2)
    config = replace(
        CONFIG, model=model, workload=replace(CONFIG.workload, **drafting(1, 2, draft_acceptance=(1, 0.0)))
    )
    config = with_draft(replace(config, workload=replace(config.workload, osl=12)))
    done: Served = served(tmp_path / "run", model=model, workload=config.workload)
    assert done.code == 0
    facts = done.facts()
    assert facts.draft_trials == facts.draft_accepted[:1] * 2
    result = derive(config, done.events())
    drafts = result.speculation
    assert drafts is not None
    assert drafts.acceptance == (1.0, 0.0)
    assert 1.9 < drafts.tokens_per_step <= 2
    assert drafts.speedup == pytest.approx(drafts.plain_tpot_ms / drafts.drafted_tpot_ms)
    assert (drafts.modelled_speedup, drafts.modelled_note) == (None, "the speed of a CPU is not predicted")
    assert "FORCED_ACCEPTANCE" in {warning.code for warning in result.warnings}
    assert "forced" in summary(result)
    assert facts.weight_bytes > 4 * model.vocab * model.hidden * 3  # embedding and head of two models
