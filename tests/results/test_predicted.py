"""Out-of-core results: predicted against measured, and HFU with what the plan computes again."""

from dataclasses import replace

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Machine
from llmb.events import RunEnded, StepDone
from llmb.report.summary import summary
from llmb.results.derive import derive


@pytest.fixture
def config(recipes):
    """A stand-in whose plan was made for 2 s a step."""
    actual = resolve(recipes["outofcore_llama3"], RunRequest(size="8b", dtype="bf16", gpus=1, proxy="small"))
    expected = replace(actual.workload.prediction, step_s=2.0)
    return replace(actual, workload=replace(actual.workload, prediction=expected))


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


def test_without_a_prediction_there_is_nothing_to_compare(config):
    unknown = replace(config.workload, prediction=replace(config.workload.prediction, step_s=None))
    assert derive(replace(config, workload=unknown), events()).predicted is None
    assert derive(config, events(status="failed")).predicted is None
    assert "against prediction" not in summary(derive(replace(config, workload=unknown), events()))
