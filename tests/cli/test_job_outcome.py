"""Row of a Slurm job when Slurm's state and the run folder disagree."""

import os
import time
from argparse import Namespace
from datetime import datetime

import pytest

from llmb.cli.jobs import polling, rebuild
from llmb.cli.jobs.job_outcome import record_outcome
from llmb.cli.jobs.polling import Poller
from llmb.cli.jobs.watch import watch
from llmb.cli.stored_runs import write_result
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.config.serialization import read_json
from llmb.errors import LaunchError
from llmb.events import RunEnded, RunStarted, StepDone, append
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunFolder, store_path
from llmb.launch.slurm.slurm_jobs import JobState
from llmb.launch.slurm.submission import Submission, write_submission
from llmb.results.job_store import Store


@pytest.fixture
def config(recipes):
    return resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))


@pytest.fixture
def run(config):
    run = RunFolder.create(install_root(os.environ), config, datetime.now())
    write_submission(run, Submission(token="llmb:mine"))
    return run


@pytest.fixture
def store():
    with Store(store_path(install_root(os.environ))) as store:
        yield store


@pytest.fixture
def job(store, config, run):
    return store.job(store.submitted(store.add(config, run.path, "slurm", status="submitting"), "17"))


def ended(**fields):
    return JobState(job_id="17", phase="ended", **fields)


def test_ranks_that_outlive_their_supervisor_decide_the_status(run, config, job):
    append(run.events(0), RunStarted(time=1.0, host="n1", world_size=1))
    append(run.events(0), RunEnded(time=2.0, status="failed", reason="the process that watched the engine was killed"))
    write_result(run, config)
    for step in range(1, config.workload.steps + 1):
        append(run.events(0), StepDone(step=step, seconds=2.0, tokens=1000))
    append(run.events(0), RunEnded(time=3.0, status="ok"))
    columns = record_outcome(run, job, ended(state="FAILED", exit_code=2))
    assert (columns["status"], columns["step_time_s"], columns["slurm_state"]) == ("ok", 2.0, "FAILED")
    assert read_json(run.result)["status"] == "ok"


def test_run_whose_job_runner_was_killed_has_failed(run, job):
    append(run.events(0), RunEnded(time=2.0, status="timeout", reason="interrupted by SIGUSR1 after step 3"))
    columns = record_outcome(run, job, ended(state="FAILED", signal=9))
    assert columns["status"] == "failed"
    assert "was killed" in columns["reason"]


@pytest.mark.parametrize("reused", [{"comment": "llmb:another"}, {"folder": "/w/experiments/x/x_20200101-000000/x"}])
def test_job_whose_id_was_reused_is_lost_at_once(reused, monkeypatch, store, job):
    monkeypatch.setattr(polling, "states", lambda ids: {"17": ended(state="COMPLETED", exit_code=0, **reused)})
    (row,) = Poller(store).refresh([job])
    assert (row.status, row.job_id) == ("lost", "17")


@pytest.mark.parametrize("comment", [{"comment": "llmb:mine"}, {}])
def test_state_of_the_same_job_is_accepted(comment, monkeypatch, store, job, run):
    state = ended(state="FAILED", exit_code=3, folder=f"/elsewhere/{run.path.parent.name}/{run.name}", **comment)
    monkeypatch.setattr(polling, "states", lambda ids: {"17": state})
    (row,) = Poller(store).refresh([job])
    assert (row.status, row.slurm_state) == ("failed", "FAILED")


def test_row_rebuilt_while_its_outcome_is_recorded_is_old_or_new_never_mixed(run, config, job, monkeypatch):
    run.write_record(config, "17", "slurm")
    load = rebuild.load_run

    def load_then_record(folder):
        loaded = load(folder)
        record_outcome(folder, job, ended(state="CANCELLED"))  # by another process, between two reads of the folder
        return loaded

    monkeypatch.setattr(rebuild, "load_run", load_then_record)
    late = rebuild.row_from_folder(run)
    assert (late.status, late.reason, late.slurm_state) == ("pending", None, None)
    row = rebuild.row_from_folder(run)
    assert (row.status, row.slurm_state) == ("incomplete", "CANCELLED")
    assert "cancelled" in row.reason


@pytest.fixture
def unwritable(monkeypatch):
    """Nothing can be written to run folders any more."""

    def refuse(path, *_arguments, **_options):
        raise LaunchError(f"cannot write {path.name}: No space left on device")

    monkeypatch.setattr("llmb.cli.stored_runs.write_atomic", refuse)
    monkeypatch.setattr("llmb.cli.jobs.job_outcome.write_atomic", refuse)
    monkeypatch.setattr("llmb.launch.run_folder.write_atomic", refuse)


def full_store(*_arguments, **_columns):
    raise LaunchError("the job store cannot be written: database or disk is full")


def watched(store) -> int:
    return watch(store, Namespace(limit=20, status=None, workload=None, since=None, on=None))


@pytest.mark.parametrize("store_is_full", [False, True])
def test_slurm_job_with_an_unwritable_folder_ends_in_the_table(
    run, store, job, unwritable, monkeypatch, capsys, store_is_full
):
    append(run.events(0), RunStarted(time=1.0, host="n1", world_size=1))
    append(run.events(0), RunEnded(time=2.0, status="failed", reason="ValueError: no such layer"))
    state = ended(state="FAILED", exit_code=2, started_at=1.0, ended_at=time.time())
    monkeypatch.setattr(polling, "states", lambda job_ids: {"17": state})
    assert Poller(store).refresh([job])[0].status == "pending"  # the disk may have space again soon
    state = ended(state="FAILED", exit_code=2, started_at=1.0, ended_at=2.0)
    if store_is_full:
        monkeypatch.setattr(Store, "move_on", full_store)
    capsys.readouterr()
    assert watched(store) == 0
    printed = capsys.readouterr()
    assert "ValueError: no such layer; cannot write result.json: No space left on device" in printed.out
    assert printed.err.count("cannot write result.json") == 1
    assert ("database or disk is full" in printed.err) == store_is_full
    assert store.job("17").status == ("pending" if store_is_full else "failed")


@pytest.mark.parametrize("store_is_full", [False, True])
def test_local_run_with_an_unwritable_folder_ends_in_the_table(
    run, store, config, unwritable, monkeypatch, capsys, store_is_full
):
    store.add(config, run.path)
    append(run.events(0), RunStarted(time=1.0, host="n1", world_size=1))
    if store_is_full:
        monkeypatch.setattr(Store, "move_on", full_store)
    assert watched(store) == 0
    printed = capsys.readouterr().out
    assert "incomplete (no end was recorded: " in printed
    assert "; cannot write result.json: No space left on device)" in printed
    assert store.job("L1").status == ("running" if store_is_full else "incomplete")


def test_local_run_whose_folder_is_gone_is_lost(run, store, config, capsys):
    store.add(config, run.path)
    run.config.rename(run.config.with_name("moved"))
    assert watched(store) == 0
    assert "lost (its run folder cannot be read: " in capsys.readouterr().out
    run.config.with_name("moved").rename(run.config)
    assert [job.status for job in Poller(store).refresh(store.jobs())] == ["incomplete"]


def test_submitted_run_whose_folder_becomes_unwritable_is_stored(config, monkeypatch, store):
    """llmb-run itself waits for the run, and cannot even append how it ended."""
    from llmb.cli import submit

    def launch(*_arguments):
        raise LaunchError("cannot write log: No space left on device")

    monkeypatch.setattr(submit, "_launch", launch)
    monkeypatch.setattr("llmb.cli.stored_runs.write_atomic", full_store)
    with pytest.raises(LaunchError, match="cannot write log"):
        submit.execute(config, {}, "local", lambda job_id, run: None, lambda event: None)
    stored = store.jobs()[-1]
    assert stored.status == "failed"
    assert (stored.reason or "").startswith("cannot write log: No space left on device; ")
