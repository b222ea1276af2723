"""Result of one rank: measured and modelled apart, never as a run of all ranks."""

import pytest

from llmb.cli.jobs.job_table import describe_run
from llmb.config.resolve import resolve
from llmb.config.row_selection import OneRankRequest, RunRequest
from llmb.config.serialization import build, to_plain
from llmb.config.spec import Machine, RunConfig
from llmb.events import RunEnded, RunStarted, StepDone
from llmb.launch.run_files.job_record import experiment_id
from llmb.report.compare.compare_doubts import doubts
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.results.job_store import job_row
from llmb.results.result import Result
from llmb.results.timed_run import timed_run

HERE = Machine(gpu="h200", gpus=1, gpus_per_node=1)


def nemotron(recipes, **more):
    return resolve(recipes["pretrain_nemotronh"], RunRequest(size="56b", dtype="fp8", gpus=32, gpu="h100", **more))


@pytest.fixture
def alone(recipes):
    return nemotron(recipes, one_rank=OneRankRequest(machine=HERE))


@pytest.fixture
def result(alone):
    return derive(alone, events(12.0))


def events(seconds):
    steps = [StepDone(step=n, steps=50, seconds=seconds, tokens=96 * 8192) for n in range(1, 51)]
    return [RunStarted(time=0.0, gpu_name="NVIDIA H200"), *steps, RunEnded(status="ok")]


def test_measured_and_modelled_parts_are_separate_fields(result):
    step = result.one_rank
    assert (step.rank, step.ranks, step.layout, step.machine) == (0, 32, "tp8 dp4", "h200")
    assert step.measured_s == result.step_time_s.median == 12.0
    assert set(step.communication_s) == {"tp", "dp"}
    assert step.step_time_s == pytest.approx(12.0 + sum(step.communication_s.values()) + step.bubble_s)
    assert step.reference.value == 15.119
    assert step.reference.ratio == pytest.approx(15.119 / step.step_time_s)


def test_nothing_reads_as_a_run_of_all_ranks(result):
    assert (result.tokens_per_s, result.tokens_per_s_per_gpu, result.days_per_1t_tokens) == (None, None, None)
    assert (result.tflops_per_gpu, result.mfu, result.hfu, result.reference) == (None, None, None, None)
    assert (result.loss_first, result.loss_last) == (None, None)
    codes = [warning.code for warning in result.warnings]
    assert "ONE_RANK" in codes
    assert "OTHER_GPU" not in codes  # it ran where it was meant to
    assert build(Result, to_plain(result), "result") == result


def test_timing_scripts_print_no_rate_of_the_cluster(alone, tmp_path):
    timed = timed_run(tmp_path / "log", alone, events(12.0), None)
    assert {(step.seconds, step.tflops_per_gpu) for step in timed.steps.values()} == {(12.0, None)}


def test_text_says_what_is_measured_and_what_is_modelled(result):
    text = summary(result)
    communication, total = sum(result.one_rank.communication_s.values()), result.one_rank.step_time_s
    assert (
        f"one rank of 32: measured compute 12 s + modelled communication {communication:.4g} s + bubble 0 s"
        f" = {total:.4g} s"
    ) in text
    assert "over the modelled step, not a measured one" in text
    assert "against reference" not in text
    assert "throughput" not in text


def test_a_comparison_with_all_ranks_is_doubted(recipes, alone, result):
    everything = nemotron(recipes)
    reasons = list(doubts((alone, result), (everything, derive(everything, events(12.0)))))
    assert "without communication one rank runs alone: A is rank 0 of 32, B is all its ranks" in reasons
    assert not [reason for reason in doubts((alone, result), (alone, result)) if "alone" in reason]


def test_jobs_and_ids_tell_it_from_a_run_of_all_ranks(recipes, alone, tmp_path):
    everything = nemotron(recipes)
    rows = [describe_run(job_row(c, tmp_path, "local", "L1", 0.0, status="ok")) for c in (alone, everything)]
    assert rows == ["56b fp8 x32+", "56b fp8 x32"]
    assert experiment_id(alone) != experiment_id(everything)
    assert alone.name != everything.name
    assert build(RunConfig, to_plain(alone), "config") == alone
