"""Profile of a run: where it lies and what opens it; the page of an out-of-core run, drawn with its result; a damaged
timeline does not cost the result."""

from dataclasses import replace
from datetime import datetime

import pytest

from llmb.cli.profile_pictures import describe_profile
from llmb.cli.stored_runs import write_result
from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.spec import Profile
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


@pytest.fixture
def profiled(recipes, tmp_path):
    """Configuration and folder of a training run with -p."""
    profile = Setting(field="profile", value=True, source="-p")
    request = RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small", settings=(profile,))
    config = resolve(recipes["pretrain_llama3.1"], request)
    return config, RunFolder.create(tmp_path / "llmb", config, datetime.now())


def test_every_kind_of_profile_is_named_with_the_program_that_opens_it(profiled):
    config, run = profiled
    assert describe_profile(run, config) == [f"profile: none was written; the log may say why: {run.log}"]
    for name in ("profile/trace.rank0.json.gz", "profile/trace.rank1.json.gz", "nsys_profile/profile_1_0_0.nsys-rep"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).touch()
    assert describe_profile(run, config) == [
        f"trace: {run.profile}/trace.rank0.json.gz",
        "  open it in ui.perfetto.dev; 1 more beside it, one per rank",
        f"profile: {run.path}/nsys_profile/profile_1_0_0.nsys-rep",
        "  open it in Nsight Systems: nsys-ui FILE, or nsys stats FILE",
    ]
    run.profile_page.touch()
    assert describe_profile(run, config)[:2] == [f"profile: {run.profile_page}", "  open it in a browser"]


def test_run_without_a_profile_has_no_line(profiled):
    config, run = profiled
    assert describe_profile(run, replace(config, profile=Profile())) == []
