"""llmb-run killed at every step of a submission, and ten of them concurrently on one $LLMB_INSTALL: no job is lost."""

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
TIMEOUT_S = 300.0
SUBMIT = ["submit", *RUN, "--scale", "1", "--on", "slurm", "--slurm-arg", "hold", "--yes", "--json"]
# Wraps one function of the program, which then kills itself before or after the first call.
KILLED_AT = """
import os, signal, sys
from importlib import import_module
from llmb.cli.llmb_run import main
function, when, *arguments = sys.argv[1:]
module, _, path = function.partition(":")
*owners, name = path.split(".")
owner = import_module(module)
for attribute in owners:
    owner = getattr(owner, attribute)
real = getattr(owner, name)
def die(*args, **kwargs):
    if when == "after":
        real(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, staticmethod(die) if name == "create" else die)
main(arguments)
"""
STEPS = [
    "llmb.launch.run_folder:RunFolder.create",
    "llmb.launch.run_folder:RunFolder.write_job_script",
    "llmb.cli.submit_batch:write_submission",
    "llmb.results.job_store:Store.add",
    "llmb.cli.submit_batch:_add_to_store",
    "llmb.launch.slurm.slurm_jobs:submit",
    "llmb.launch.run_folder:RunFolder.write_record",
    "llmb.results.job_store:Store.submitted",
]


@pytest.fixture(autouse=True)
def empty_folder(slurm, tmp_path, monkeypatch):
    """Work in a folder without any configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def table(llmb_run):
    """Return the rows of `jobs --json` by run folder, without their timestamps."""
    for _ in range(2):  # a job recovered by the first refresh gets its outcome in the second
        code, out, err = llmb_run("jobs", "--json")
        assert (code, err) == (0, "")
    timestamps = ("created_at", "updated_at", "refreshed_at")
    rows = [json.loads(line) for line in out.splitlines()]
    return {row["run_dir"]: {k: v for k, v in row.items() if k not in timestamps} for row in rows}


def slurm_jobs_by_folder(slurm, install):
    """Return id and state of Slurm's job for each run folder."""
    folders = {read_submission(run).token: str(run.path) for run in RunFolder.find_all(install) if read_submission(run)}
    lines = slurm.call("squeue", "-h", "--states=all", "-o", "%i %T %k").splitlines()
    by_comment = {comment: (job_id, state) for job_id, state, comment in (line.split(" ", 2) for line in lines)}
    return {folder: by_comment[token] for token, folder in folders.items() if token in by_comment}


def test_submitter_killed_at_any_step_loses_no_job(slurm, llmb_run, monkeypatch, campaign):
    campaign("kills of submit", 2 * len(STEPS))
    for step in STEPS:
        for when in ("before", "after"):
            killed = [sys.executable, "-c", KILLED_AT, step, when, *SUBMIT, "-r", "2"]
            assert subprocess.run(killed, timeout=TIMEOUT_S, capture_output=True).returncode == -9
    slurm.wait_for_submissions()
    monkeypatch.setattr(lost_submissions, "REQUEST_TIMEOUT_S", 0.0)
    before, in_slurm = table(llmb_run), slurm_jobs_by_folder(slurm, install_root(os.environ))
    assert len(in_slurm) >= 4  # killed after sbatch
    assert in_slurm.keys() <= before.keys()
    for folder, row in before.items():
        if folder in in_slurm:
            assert (row["job_id"], row["status"]) == (in_slurm[folder][0], "pending")
        else:
            assert (row["status"], row["reason"]) == ("failed", lost_submissions.NEVER_SUBMITTED)
    assert llmb_run("jobs", "rebuild")[0] == 0
    assert table(llmb_run) == before
    assert llmb_run("jobs", "cancel", "--all")[0] == 0
    monkeypatch.setattr(polling, "FILE_SYNC_S", 0.0)
    cancelled = table(llmb_run)
    assert {row["status"] for folder, row in cancelled.items() if folder in in_slurm} == {"incomplete"}
    assert llmb_run("jobs", "rebuild")[0] == 0
    assert table(llmb_run) == cancelled


@pytest.mark.nightly
def test_submitter_killed_at_any_time_loses_no_job(slurm, llmb_run, monkeypatch, campaign):
    campaign("kills of submit", 1)
    install = install_root(os.environ)
    submitter = subprocess.Popen([*LLMB_RUN, *SUBMIT, "-r", "100"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while len(list(RunFolder.find_all(install))) < 40:
        assert submitter.poll() is None
    submitter.kill()
    submitter.communicate()
    slurm.wait_for_submissions()
    monkeypatch.setattr(lost_submissions, "REQUEST_TIMEOUT_S", 0.0)
    before, in_slurm = table(llmb_run), slurm_jobs_by_folder(slurm, install)
    assert {row["reason"] for row in before.values() if row["status"] == "failed"} <= {lost_submissions.NEVER_SUBMITTED}
    pending = {folder: row["job_id"] for folder, row in before.items() if row["status"] != "failed"}
    assert pending == {folder: job_id for folder, (job_id, _) in in_slurm.items()}
    assert {before[folder]["status"] for folder in pending} == {"pending"}
    assert llmb_run("jobs", "rebuild")[0] == 0
    assert table(llmb_run) == before


def test_job_whose_id_was_reused_is_not_mistaken_for_the_new_one(slurm, llmb_run):
    """A controller that is killed loses the jobs of its last seconds, and assigns their ids again."""
    slurm.wait_until_saved(json.loads(llmb_run(*SUBMIT)[1])["job_id"])  # and with it the next job id
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
def test_ten_processes_submit_list_rebuild_and_cancel_concurrently(slurm, llmb_run, monkeypatch):
    commands = [[*SUBMIT, "-r", "3"]] * 5 + [["jobs", "--json"]] * 2 + [["jobs", "rebuild"]] * 2
    commands += [["jobs", "cancel", "--all", "--status", "pending"]]
    loop = 'for i in 1 2 3; do "$@" || exit; done'
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(["bash", "-c", loop, "loop", *LLMB_RUN, *command], **pipes) for command in commands]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0] * 10
    lines = [line for _, err in outputs[:5] for line in err.splitlines()]
    assert all("3 jobs, 3 ranks on CPUs in all" in line for line in lines), lines  # the totals of each submission
    others = {line for _, err in outputs[5:] for line in err.splitlines()}
    assert others <= {"no active run is selected"}  # `jobs cancel` may come before the first submission
    submissions = [json.loads(line) for out, _ in outputs[:5] for line in out.splitlines()]
    assert len(submissions) == 45
    monkeypatch.setattr(polling, "FILE_SYNC_S", 0.0)
    before, in_slurm = table(llmb_run), slurm_jobs_by_folder(slurm, install_root(os.environ))
    assert {job["run_dir"]: job["job_id"] for job in submissions} == {
        folder: row["job_id"] for folder, row in before.items()
    }
    for folder, row in before.items():
        job_id, state = in_slurm[folder]
        assert (row["job_id"], row["slurm_state"]) == (job_id, state)
        assert row["status"] == {"PENDING": "pending", "CANCELLED": "incomplete"}[state]
    assert llmb_run("jobs", "rebuild")[0] == 0
    assert table(llmb_run) == before
