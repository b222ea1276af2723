"""What becomes of a Slurm job's row when Slurm's word and the run folder do not say the same."""

import os
from datetime import datetime

import pytest

from llmb.cli.jobs import polling, rebuild
from llmb.cli.jobs.polling import Poller
from llmb.cli.jobs.slurm_ending import settle
from llmb.cli.stored_runs import keep_result
from llmb.config.resolve import resolve
from llmb.config.row_selection import Request
from llmb.config.serialization import read_json
from llmb.events import RunEnded, RunStarted, StepDone, append
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunDir, store_path
from llmb.launch.slurm.slurm_jobs import JobState
from llmb.launch.slurm.submission import Submission, keep_submission
from llmb.results.job_store import Store


@pytest.fixture
def config(recipes):
    return resolve(recipes["pretrain_llama3.1"], Request(size="8b", dtype="fp32", gpus=1, proxy="small"))


@pytest.fixture
def run(config):
    run = RunDir.create(install_root(os.environ), config, datetime.now())
    keep_submission(run, Submission(token="llmb:mine"))
    return run


@pytest.fixture
def store():
    with Store(store_path(install_root(os.environ))) as store:
        yield store


@pytest.fixture
def job(store, config, run):
    return store.job(store.submitted(store.add(config, run.path, "slurm", status="submitting"), "17"))


def ended(**said):
    return JobState(job_id="17", phase="ended", **said)


def test_ranks_that_outlived_what_watched_them_have_the_last_word(run, config, job):
    append(run.events(0), RunStarted(time=1.0, host="n1", world_size=1))
    append(run.events(0), RunEnded(time=2.0, status="failed", reason="the process that watched the engine was killed"))
    keep_result(run, config)
    for step in range(1, config.workload.steps + 1):
        append(run.events(0), StepDone(step=step, seconds=2.0, tokens=1000))
    append(run.events(0), RunEnded(time=3.0, status="ok"))
    columns = settle(run, job, ended(state="FAILED", exit_code=2))
    assert (columns["status"], columns["step_time_s"], columns["slurm_state"]) == ("ok", 2.0, "FAILED")
    assert read_json(run.result)["status"] == "ok"


def test_a_run_that_was_stopped_because_its_steward_was_killed_has_failed(run, job):
    append(run.events(0), RunEnded(time=2.0, status="timeout", reason="interrupted by SIGUSR1 after step 3"))
    columns = settle(run, job, ended(state="FAILED", signal=9))
    assert columns["status"] == "failed"
    assert "was killed" in columns["reason"]


@pytest.mark.parametrize("stranger", [{"comment": "llmb:another"}, {"folder": "/w/experiments/x/x_20200101-000000/x"}])
def test_a_number_that_is_anothers_by_now_is_known_to_be_at_once(stranger, monkeypatch, store, job):
    monkeypatch.setattr(polling, "states", lambda ids: {"17": ended(state="COMPLETED", exit_code=0, **stranger)})
    (row,) = Poller(store).refresh([job])
    assert (row.status, row.job_id) == ("lost", "17")


@pytest.mark.parametrize("known", [{"comment": "llmb:mine"}, {}])
def test_its_own_number_is_believed(known, monkeypatch, store, job, run):
    said = ended(state="FAILED", exit_code=3, folder=f"/elsewhere/{run.path.parent.name}/{run.name}", **known)
    monkeypatch.setattr(polling, "states", lambda ids: {"17": said})
    (row,) = Poller(store).refresh([job])
    assert (row.status, row.slurm_state) == ("failed", "FAILED")


def test_a_row_made_anew_while_its_job_is_settled_is_old_or_new_and_never_both(run, config, job, monkeypatch):
    run.write_record(config, "17", "slurm")
    load = rebuild.load_run

    def load_and_be_late(folder):
        found = load(folder)
        settle(folder, job, ended(state="CANCELLED"))  # another process, between two looks at the folder
        return found

    monkeypatch.setattr(rebuild, "load_run", load_and_be_late)
    late = rebuild.row_of(run)
    assert (late.status, late.reason, late.slurm_state) == ("pending", None, None)
    row = rebuild.row_of(run)
    assert (row.status, row.slurm_state) == ("incomplete", "CANCELLED")
    assert "cancelled" in row.reason
