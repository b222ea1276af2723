"""Profile page of an out-of-core run, drawn with its result; a damaged timeline does not cost the result."""

from dataclasses import replace
from datetime import datetime

import pytest

from llmb.cli.stored_runs import write_result
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.launch.run_folder import RunFolder
from llmb.perfmodel.offload.machine_rates import NOMINAL_CPU
from llmb.perfmodel.offload.simulator import simulate
from llmb.perfmodel.offload.stream_timeline import StreamTimeline, write_timeline


@pytest.fixture
def config(recipes):
    config = resolve(recipes["outofcore_llama3"], RunRequest(size="3b", dtype="bf16", gpus=1, proxy="small"))
    expected = replace(config.workload.prediction, step_s=1.0)
    return replace(config, workload=replace(config.workload, prediction=expected))


@pytest.fixture
def run(config, tmp_path):
    run = RunFolder.create(tmp_path / "llmb", config, datetime.now())
    run.profile.mkdir()
    return run


def test_measured_and_predicted_streams_are_on_one_page(config, run):
    events = simulate(config.model, config.workload.plan, NOMINAL_CPU, with_events=True).events
    write_timeline(run.stream_timeline, StreamTimeline(source="measured", events=events))
    write_result(run, config)
    page = run.profile_page.read_text()
    assert config.name in page
    assert "predicted" in page
    assert "2 sequences, 2,048 tokens" in page


def test_damaged_timeline_is_a_warning(config, run, capsys):
    run.stream_timeline.write_text("{}")
    write_result(run, config)
    assert run.result.exists()
    assert not run.profile_page.exists()
    assert capsys.readouterr().err.startswith("warning: no profile.html: ")


def test_run_without_profile_has_no_page(config, run):
    write_result(run, config)
    assert not run.profile_page.exists()
