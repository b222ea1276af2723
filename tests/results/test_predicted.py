"""Results beside their predictions: of a training step, of an out-of-core plan; HFU with what the plan recomputes."""

import json
import re
from dataclasses import replace

import pytest

from llmb.config.load_settings import config_from_json
from llmb.config.overrides import from_arguments
from llmb.config.resolve import resolve
from llmb.config.row_selection import OneRankRequest, RunRequest
from llmb.config.serialization import build, to_json
from llmb.config.spec import Machine
from llmb.events import RunEnded, StepDone
from llmb.perfmodel.explain.run_prediction import predict_run, with_prediction
from llmb.report.predictions.predicted_lines import predicted_lines
from llmb.report.summary import summary
from llmb.results.derive import derive
from llmb.results.result import Result


@pytest.fixture
def config(recipes):
    """A stand-in whose plan was made for 2 s a step."""
    actual = resolve(recipes["outofcore_llama3"], RunRequest(size="8b", dtype="bf16", gpus=1, proxy="small"))
    expected = replace(actual.workload.prediction, step_s=2.0)
    planned = replace(actual, workload=replace(actual.workload, prediction=expected))
    return replace(planned, predicted=predict_run(planned))


def events(seconds=2.5, tokens=2048, status="ok"):
    steps = [StepDone(step=n, steps=7, seconds=seconds, tokens=tokens, loss=8.0) for n in range(1, 8)]
    return [*steps, RunEnded(status=status)]


def test_measured_stands_beside_what_the_plan_expected(config):
    result = derive(config, events())
    assert result.predicted is not None
    assert (result.predicted.metric, result.predicted.value, result.predicted.measured) == ("step_time_s", 2.0, 2.5)
    assert result.predicted.ratio == pytest.approx(0.8)
    assert "against prediction" in summary(result)
    assert "0.800" in summary(result)


def test_hfu_counts_what_the_plan_computes_again(config):
    on_gpu = replace(config, machine=Machine(gpu="h200", gpus=1, gpus_per_node=8))
    result = derive(on_gpu, events())
    executed = config.workload.prediction.hardware_flops / 2.5 / 989e12
    assert result.hfu == pytest.approx(executed)
    assert result.mfu < result.hfu


def test_a_plan_without_a_time_names_what_was_not_measured(config):
    plan = replace(config.workload.prediction, step_s=None, disk_bytes={})
    on_gpu = replace(config, machine=Machine(gpu="h100", gpus=1, gpus_per_node=8))

    def note(config, plan):
        return predict_run(replace(config, workload=replace(config.workload, prediction=plan))).note

    assert note(config, plan) == "the speed of a CPU is not predicted"
    assert note(on_gpu, plan) == "the rates of h100 are not known; `llmb-run probe` measures them"
    on_disk = replace(plan, disk_bytes={"state": 2**30}, rates={**plan.rates, "disk_read_gbs": None})
    assert note(on_gpu, on_disk).startswith("the rates of the disk are not known; `llmb-run probe --disk-path FOLDER`")


def test_peak_memory_says_whose_it_is(config, recipes):
    steps = [StepDone(step=n, seconds=1.0, tokens=8, memory_bytes=2**30) for n in range(1, 8)]
    assert "device buffers of the plan" in summary(derive(config, [*steps, RunEnded(status="ok")]))
    trained = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    assert "highest process memory in use" in summary(derive(trained, [*steps, RunEnded(status="ok")]))


def test_without_a_prediction_there_is_nothing_to_compare(config):
    unknown = replace(config, workload=replace(config.workload, prediction=None), predicted=None)
    assert derive(unknown, events()).predicted is None
    assert derive(config, events(status="failed")).predicted is None
    assert "against prediction" not in summary(derive(unknown, events()))


def test_an_older_out_of_core_run_has_the_prediction_of_its_plan(config):
    assert derive(replace(config, predicted=None), events()).predicted == derive(config, events()).predicted


@pytest.fixture
def training(recipes):
    settings = tuple(from_arguments(["steps=7", "window=3-7"]))
    request = RunRequest(size="8b", dtype="fp8", gpus=8, gpu="h100", settings=settings)
    return with_prediction(resolve(recipes["pretrain_llama3.1"], request))


def test_a_stored_prediction_stays(training):
    older = replace(training, predicted=replace(training.predicted, value=1.0))
    assert with_prediction(older) is older


def test_a_training_run_stores_its_prediction_and_config_json_reads_it_back(training):
    assert training.predicted.interval_80[0] < training.predicted.value < training.predicted.interval_80[1]
    assert sum(training.predicted.terms.values()) == pytest.approx(training.predicted.value)
    assert config_from_json(json.loads(to_json(training)), "config.json") == training


def test_a_config_json_from_before_predictions_is_read(training):
    data = json.loads(to_json(training))
    del data["predicted"]
    older = config_from_json(data, "config.json")
    assert older.predicted is None
    assert derive(older, events()).predicted is None


def test_inside_the_interval_there_is_no_reason_to_look_for(training):
    result = derive(training, events(seconds=1.001 * training.predicted.value, tokens=128 * 8192))
    assert result.predicted.ratio == pytest.approx(1 / 1.001)
    assert result.predicted.likely_reason is None
    assert "within the 80 % interval" in summary(result)


def test_outside_the_interval_a_warning_of_the_run_is_the_likely_reason(training):
    slow = events(seconds=2 * training.predicted.value, tokens=128 * 8192)
    assert "profile it" in derive(training, slow).predicted.likely_reason
    traced = replace(training, profile=replace(training.profile, profile=True))
    result = derive(traced, slow)
    assert result.predicted.likely_reason == "tracing slows it"
    assert "outside the 80 % interval" in summary(result)
    assert build(Result, json.loads(to_json(result)), "result.json") == result


def test_a_proxy_on_a_cpu_says_why_it_is_not_predicted(recipes):
    request = RunRequest(size="8b", dtype="bf16", gpus=1, proxy="small")
    config = with_prediction(resolve(recipes["pretrain_llama3.1"], request))
    assert config.predicted.value is None
    assert predicted_lines(config)[0] == "predicted step time: unknown (the speed of a CPU is not predicted)"
    assert predicted_lines(config)[1].endswith("GiB per process")
    one_rank = OneRankRequest(rank=0, machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1))
    request = RunRequest(size="314b", dtype="fp8", gpus=16, gpu="h100", proxy="small", one_rank=one_rank)
    alone = resolve(recipes["pretrain_grok1"], request)
    alone = replace(alone, predicted=predict_run(alone))
    assert predicted_lines(alone)[1].endswith("GiB per process")  # the row is an H100's, the rank runs on a CPU


def test_cuda_graphs_that_the_engine_cannot_capture_have_a_predicted_cost(recipes):
    def lines(*arguments: str) -> list[str]:
        settings = tuple(from_arguments(list(arguments)))
        request = RunRequest(size="8b", dtype="fp8", gpus=16, gpu="h100", settings=settings)
        return predicted_lines(with_prediction(resolve(recipes["pretrain_llama3.1"], request)))

    (line,) = (line for line in lines("pp=2") if "CUDA graphs" in line)
    assert re.fullmatch(r"predicted cost of running without CUDA graphs: \d\.\d% of the step time", line)
    assert not any("CUDA graphs" in line for line in lines())


def test_a_rank_that_runs_alone_is_predicted_without_its_peers(recipes):
    whole = RunRequest(size="70b", dtype="fp8", gpus=64, gpu="h100")
    here = OneRankRequest(rank=0, machine=Machine(gpu="h200", gpus=1, gpus_per_node=8))
    config = with_prediction(resolve(recipes["pretrain_llama3.1"], replace(whole, one_rank=here)))
    alone = config.predicted
    line = predicted_lines(config)[0]
    assert line.startswith("predicted step time of one rank: ")
    assert "tokens/s" not in line  # as if all ranks had run
    assert alone.terms.keys().isdisjoint({"tp", "pp", "dp", "bubble", "jitter"})
    assert alone.value < predict_run(resolve(recipes["pretrain_llama3.1"], whole)).value
