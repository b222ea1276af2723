"""llmb-run killed at every step of a submission, and ten of them at once on one $LLMB_INSTALL: nothing is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_injector import LLMB_RUN, RUN

from llmb.cli.jobs import lost_submissions, polling
from llmb.launch.install_root import install_root
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.submission import read_submission

pytestmark = pytest.mark.slurm
PATIENCE_S = 300.0
SUBMIT = ["submit", *RUN, "--scale", "1", "--on", "slurm", "--slurm-arg", "hold", "--json"]
# Wraps one function of the program, which then kills itself before or after its first call.
KILLED_AT = """
import os, signal, sys
from importlib import import_module
from llmb.cli.llmb_run import main
place, when, *arguments = sys.argv[1:]
module, _, path = place.partition(":")
*owners, name = path.split(".")
owner = import_module(module)
for part in owners:
    owner = getattr(owner, part)
real = getattr(owner, name)
def die(*given, **named):
    if when == "after":
        real(*given, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, staticmethod(die) if name == "create" else die)
main(arguments)
"""
STEPS = [
    "llmb.launch.run_folder:RunFolder.create", "llmb.launch.run_folder:RunFolder.write_job_script",
    "llmb.cli.submit_batch:write_submission", "llmb.results.job_store:Store.add", "llmb.cli.submit_batch:_add_to_store",
    "llmb.launch.slurm.slurm_jobs:submit", "llmb.launch.run_folder:RunFolder.write_record", "llmb.results.job_store:Store.submitted",
]  # fmt: skip


@pytest.fixture(autouse=True)
def desk(slurm, tmp_path, monkeypatch):
    """Where nothing else lies that a submission would hear."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def table(llmb_run):
    """The rows, without when they were looked at."""
    for _ in range(2):  # a job found again by the first look is settled by the second
        code, out, err = llmb_run("jobs", "--json")
        assert (code, err) == (0, "")
    unsteady = ("created_at", "updated_at", "refreshed_at")
    rows = [json.loads(line) for line in out.splitlines()]
    return {row["run_dir"]: {k: v for k, v in row.items() if k not in unsteady} for row in rows}


def jobs_of(slurm, install):
    """By run folder, what Slurm holds for it: id and state."""
    folders = {read_submission(run).token: str(run.path) for run in RunFolder.find_all(install) if read_submission(run)}
    lines = slurm.call("squeue", "-h", "--states=all", "-o", "%i %T %k").splitlines()
    held = {comment: (job_id, state) for job_id, state, comment in (line.split(" ", 2) for line in lines)}
    return {folder: held[token] for token, folder in folders.items() if token in held}


def test_a_submitter_that_is_killed_at_any_step(slurm, llmb_run, monkeypatch):
    for step in STEPS:
        for when in ("before", "after"):
            killed = [sys.executable, "-c", KILLED_AT, step, when, *SUBMIT, "-r", "2"]
            assert subprocess.run(killed, timeout=PATIENCE_S, capture_output=True).returncode == -9
    slurm.wait_for_submissions()
    monkeypatch.setattr(lost_submissions, "REQUEST_TIMEOUT_S", 0.0)
    before, held = table(llmb_run), jobs_of(slurm, install_root(os.environ))
    assert len(held) >= 4  # of those that died after they had called sbatch
    assert held.keys() <= before.keys()
    for folder, row in before.items():
        if folder in held:
            assert (row["job_id"], row["status"]) == (held[folder][0], "pending")
        else:
            assert (row["status"], row["reason"]) == ("failed", lost_submissions.NEVER_SUBMITTED)
    assert llmb_run("jobs", "rebuild")[0] == 0
    assert table(llmb_run) == before
    assert llmb_run("jobs", "cancel", "--all")[0] == 0
    monkeypatch.setattr(polling, "FILE_SYNC_S", 0.0)
    cancelled = table(llmb_run)
    assert {row["status"] for folder, row in cancelled.items() if folder in held} == {"incomplete"}
    assert llmb_run("jobs", "rebuild")[0] == 0
    assert table(llmb_run) == cancelled


def test_a_job_whose_number_slurm_gave_away_is_not_taken_for_the_other(slurm, llmb_run):
    """A controller that is killed loses what it was told in the last seconds, and counts on from before."""
    slurm.wait_until_saved(json.loads(llmb_run(*SUBMIT)[1])["job_id"])  # and with it the number that comes next
    with slurm.unable_to_save():
        first = json.loads(llmb_run(*SUBMIT)[1])
        slurm.kill_controller()
    slurm.start_controller()
    second = json.loads(llmb_run(*SUBMIT)[1])
    assert second["job_id"] == f"{first['job_id']}-2"
    assert llmb_run("jobs", "cancel", first["job_id"])[1] == f"{first['job_id']}: has ended already\n"
    rows = {row["job_id"]: row["status"] for row in table(llmb_run).values()}
    assert (rows[first["job_id"]], rows[second["job_id"]]) == ("lost", "pending")
    assert llmb_run("jobs", "cancel", second["job_id"])[1] == f"{second['job_id']}: cancelled\n"


@pytest.mark.nightly
def test_ten_at_once_submit_list_rebuild_and_cancel(slurm, llmb_run, monkeypatch):
    work = [[*SUBMIT, "-r", "3"]] * 5 + [["jobs", "--json"]] * 2 + [["jobs", "rebuild"]] * 2
    work += [["jobs", "cancel", "--all", "--status", "pending"]]
    loop = 'for i in 1 2 3; do "$@" || exit; done'
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(["bash", "-c", loop, "loop", *LLMB_RUN, *one], **quiet) for one in work]
    outputs = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [(process.returncode, err) for process, (_, err) in zip(processes, outputs, strict=True)] == [(0, "")] * 10
    told = [json.loads(line) for out, _ in outputs[:5] for line in out.splitlines()]
    assert len(told) == 45
    monkeypatch.setattr(polling, "FILE_SYNC_S", 0.0)
    before, held = table(llmb_run), jobs_of(slurm, install_root(os.environ))
    assert {one["run_dir"]: one["job_id"] for one in told} == {folder: row["job_id"] for folder, row in before.items()}
    for folder, row in before.items():
        job_id, state = held[folder]
        assert (row["job_id"], row["slurm_state"]) == (job_id, state)
        assert row["status"] == {"PENDING": "pending", "CANCELLED": "incomplete"}[state]
    assert llmb_run("jobs", "rebuild")[0] == 0
    assert table(llmb_run) == before
