"""A profiled out-of-core run gets its page of pictures when its result is kept, and a broken record costs no result."""

from dataclasses import replace
from datetime import datetime

import pytest

from llmb.cli.runs import keep_result
from llmb.lanes import Lanes, write_lanes
from llmb.launch.rundir import RunDir
from llmb.predict.rates import NOMINAL_CPU
from llmb.predict.simulation import simulate
from llmb.resolve import resolve
from llmb.selection import Request


@pytest.fixture
def config(recipes):
    found = resolve(recipes["outofcore_llama3"], Request(size="3b", dtype="bf16", gpus=1, proxy="small"))
    expected = replace(found.workload.prediction, step_s=1.0)
    return replace(found, workload=replace(found.workload, prediction=expected))


@pytest.fixture
def run(config, tmp_path):
    made = RunDir.create(tmp_path / "llmb", config, datetime.now())
    made.profile.mkdir()
    return made


def test_measured_and_predicted_lanes_come_onto_one_page(config, run):
    stretches = simulate(config.model, config.workload.plan, NOMINAL_CPU, shown=True).stretches
    write_lanes(run.lanes, Lanes(source="measured", stretches=stretches))
    keep_result(run, config)
    page = run.profile_page.read_text()
    assert config.name in page
    assert "predicted" in page
    assert "2 sequences, 2,048 tokens" in page


def test_a_damaged_record_is_a_warning(config, run, capsys):
    run.lanes.write_text("{}")
    keep_result(run, config)
    assert run.result.exists()
    assert not run.profile_page.exists()
    assert capsys.readouterr().err.startswith("warning: no profile.html: ")


def test_a_run_that_was_not_profiled_has_none(config, run):
    keep_result(run, config)
    assert not run.profile_page.exists()
