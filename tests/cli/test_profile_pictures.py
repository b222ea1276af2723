"""A profiled out-of-core run gets its page of pictures when its result is kept, and a broken record costs no result."""

from dataclasses import replace
from datetime import datetime

import pytest

from llmb.cli.stored_runs import keep_result
from llmb.config.resolve import resolve
from llmb.config.row_selection import Request
from llmb.launch.run_folder import RunDir
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU
from llmb.perfmodel.offload.simulator import simulate
from llmb.perfmodel.offload.stream_timeline import Lanes, write_lanes


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
