"""Fault injection: whatever is killed at any time, no job and no finished step is lost, and every status is true."""

import json
import os
import random
import re
import shutil
import sqlite3
from contextlib import closing, redirect_stderr, redirect_stdout
from io import StringIO

import pytest
from fault_injector import FaultInjector
from slurm_lab import SlurmLab, unavailable_reason
from small_disk import SmallDisk

from llmb.cli.jobs import lost_submissions, polling
from llmb.cli.llmb_run import main
from llmb.config.serialization import read_json
from llmb.events import LogProblem, RunEnded, StepDone, read
from llmb.launch.run_folder import RunFolder, store_path
from llmb.launch.slurm.submission import read_submission
from llmb.results.job_store import GOING

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
LIMIT_S = 900.0  # takes about 100 on two idle cores
CLUSTER = """
schema_version: 2
cluster_name: lab
gpu_type: cpu
environment: {GPUS_PER_NODE: "1", OMP_NUM_THREADS: "1"}
slurm: {common: {partition: main}, gpu: {}, cpu: {}}
"""
# The controller forgets no job before the end of the test, and detects sooner which ended while it was down.
SETTINGS = {"MinJobAge": "900", "BatchStartTimeout": "2"}
TIMESTAMPS = ("created_at", "updated_at", "refreshed_at")
LOST_JOB_FIELDS = ("slurm_state", "nodes", "submitted_at", "started_at")  # from Slurm, which has forgotten them


@pytest.fixture
def lab(tmp_path):
    """Lab with as many nodes as this machine can run ranks, one rank each, so that Slurm limits the load."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    with SlurmLab(tmp_path / "lab", nodes=3, cpus=1, gpus=1, settings=SETTINGS) as lab:
        yield lab


@pytest.fixture
def disk(tmp_path, monkeypatch):
    folder = tmp_path / "install"
    folder.mkdir()
    with SmallDisk(folder) as disk:
        (folder / "cluster_config.yaml").write_text(CLUSTER)
        monkeypatch.setenv("LLMB_INSTALL", str(folder))
        yield disk
        shutil.copytree(folder, tmp_path / "disk")  # to debug a failure


@pytest.fixture
def seed():
    value = os.environ.get("LLMB_FAULT_SEED")
    return int(value) if value else random.SystemRandom().randrange(2**32)


@pytest.mark.parametrize(("runs", "rounds"), [(6, 1), pytest.param(40, 3, marks=pytest.mark.nightly)])
def test_faults_at_random_times(lab, disk, seed, monkeypatch, runs, rounds, campaign):
    print(f"LLMB_FAULT_SEED={seed}")
    injector = FaultInjector(lab, disk, random.Random(seed))
    injector.run(runs, rounds, LIMIT_S)
    campaign("faults of a Slurm cluster at random times", sum(injector.injected.values()))
    print(dict(injector.injected), *injector.timeline, *injector.outputs, sep="\n")
    assert injector.started_runs() >= runs
    assert not [text for text in injector.outputs if "internal error" in text or "Traceback" in text]
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    disable_grace_periods(monkeypatch)
    before = final_rows()
    runs = {str(run.path): run for run in RunFolder.find_all(disk.folder)}
    check_consistency(lab, injector, before, runs)
    for row in before:
        check_run(row, runs[row["run_dir"]], injector)
    llmb_run("jobs", "rebuild")
    assert differences(comparable(before), comparable(final_rows())) == []
    with closing(sqlite3.connect(store_path(disk.folder))) as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    if not disk.mounted:
        pytest.skip("no small file system can be mounted here: all checks passed, but without a full disk")


def disable_grace_periods(monkeypatch):
    """Set all waiting times to zero: nothing is pending any more."""
    monkeypatch.setattr(polling, "UNKNOWN_JOB_GRACE_S", 0.0)
    monkeypatch.setattr(polling, "FILE_SYNC_S", 0.0)
    monkeypatch.setattr(lost_submissions, "REQUEST_TIMEOUT_S", 0.0)


def llmb_run(*arguments):
    """Run llmb-run in this process and return its output."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(arguments)
    assert (code, err.getvalue()) == (0, "")
    return out.getvalue()


def final_rows():
    for _ in range(2):  # a job recovered by the first refresh gets its outcome in the second
        out = llmb_run("jobs", "--json")
    return [json.loads(line) for line in out.splitlines()]


def comparable(rows):
    """Return the rows without fields that a rebuild may change."""
    comparable_rows = []
    for row in rows:
        excluded = (*TIMESTAMPS, *LOST_JOB_FIELDS) if row["status"] == "lost" else TIMESTAMPS
        comparable_rows.append({name: value for name, value in row.items() if name not in excluded})
    return sorted(comparable_rows, key=lambda row: row["run_dir"])


def differences(before, after):
    assert [row["run_dir"] for row in before] == [row["run_dir"] for row in after]
    pairs = [(old, new, name) for old, new in zip(before, after, strict=True) for name in old.keys() | new.keys()]
    return [(o["job_id"], name, o.get(name), n.get(name)) for o, n, name in pairs if o.get(name) != n.get(name)]


def check_consistency(lab, injector, rows, runs):
    """Check that folders, rows, Slurm's records and the output of llmb-run agree on the jobs."""
    by_folder = {row["run_dir"]: row for row in rows}
    assert len(by_folder) == len(rows)
    assert {row["job_id"] for row in rows if row["status"] in GOING} == set()
    assert by_folder.keys() <= runs.keys()
    for path in runs.keys() - by_folder.keys():  # a submitter was killed right after it created the folder
        names = {file.name for file in runs[path].path.iterdir() if not file.name.startswith(".")}
        assert names <= {"config.json", "pid", "job.sh", "submission.json"}, path
    for submission in injector.submissions:
        row = by_folder[submission["run_dir"]]
        assert row["job_id"].partition("-")[0] == submission["job_id"].partition("-")[0]
    completed = (lab.folder / "log/jobcomp.txt").read_text()
    assert set(re.findall(r" WorkDir=(\S+) ", completed)) <= by_folder.keys()
    folders = {read_submission(run).token: path for path, run in runs.items() if run.submission.exists()}
    for line in lab.call("squeue", "-h", "--states=all", "-o", "%i %k").splitlines():
        slurm_id, comment = line.split(" ", 1)
        row = by_folder[folders[comment]]
        assert (row["job_id"].partition("-")[0], row["status"] == "lost") == (slurm_id, False), row


def check_run(row, run, injector):
    """Check that the status of a run agrees with its events, and that they contain every step."""
    events = [list(read(path)) for path in run.all_events()]
    for rank_events in events:
        steps = [event.step for event in rank_events if isinstance(event, StepDone)]
        assert steps == list(range(1, len(steps) + 1)), f"{run.work}: {steps}"
        assert sum(event.count for event in rank_events if isinstance(event, LogProblem)) <= 1
    ends = [event.status for event in events[0] if isinstance(event, RunEnded)] if events else []
    complete = len(events) == row["scale"] and all(last_step(rank_events) == 20 for rank_events in events)
    assert (row["status"] == "ok") == (complete and ends[-1:] == ["ok"]), row
    if run.work in injector.killed:
        assert row["status"] != "ok", row
    if row["status"] == "lost":
        assert not ends, row
    else:
        result = read_json(run.result)
        assert (result["status"], result["reason"]) == (row["status"], row["reason"])
        assert row["status"] == "ok" or row["reason"], row


def last_step(events):
    return max((event.step for event in events if isinstance(event, StepDone)), default=0)
