"""Whatever is killed and whenever: no job is lost, no finished step, and no status is a lie."""

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
LIMIT_S = 900.0  # about a hundred on two cores that have nothing else to do
CLUSTER = """
schema_version: 2
cluster_name: lab
gpu_type: cpu
environment: {GPUS_PER_NODE: "1", OMP_NUM_THREADS: "1"}
slurm: {common: {partition: main}, gpu: {}, cpu: {}}
"""
# The controller forgets no job before the test has ended, and finds out sooner which have ended while it was away.
SETTINGS = {"MinJobAge": "900", "BatchStartTimeout": "2"}
UNSTEADY = ("created_at", "updated_at", "refreshed_at")
OF_LOST_JOBS = ("slurm_state", "nodes", "submitted_at", "started_at")  # Slurm's word, for which nobody can ask again


@pytest.fixture
def lab(tmp_path):
    """As many nodes as this machine can run ranks, each for one rank: Slurm itself sees to it that not more run."""
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
        shutil.copytree(folder, tmp_path / "what was on the disk")  # for whoever wants to know what went wrong


@pytest.fixture
def seed():
    allocated_nodes = os.environ.get("LLMB_CHAOS_SEED")
    return int(allocated_nodes) if allocated_nodes else random.SystemRandom().randrange(2**32)


@pytest.mark.parametrize(("runs", "rounds"), [(6, 1), pytest.param(40, 3, marks=pytest.mark.nightly)])
def test_faults_at_random_points(lab, disk, seed, monkeypatch, runs, rounds):
    print(f"LLMB_CHAOS_SEED={seed}")
    fault_injector = FaultInjector(lab, disk, random.Random(seed))
    fault_injector.rage(runs, rounds, LIMIT_S)
    print(dict(fault_injector.put), *fault_injector.diary, *fault_injector.said, sep="\n")
    assert fault_injector.begun() >= runs
    assert not [words for words in fault_injector.said if "internal error" in words or "Traceback" in words]
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    be_certain(monkeypatch)
    before = settled_table()
    runs = {str(run.path): run for run in RunFolder.find_all(disk.folder)}
    check_accounts(lab, fault_injector, before, runs)
    for row in before:
        check_run(row, runs[row["run_dir"]], fault_injector)
    llmb_run("jobs", "rebuild")
    assert differences(steady(before), steady(settled_table())) == []
    with closing(sqlite3.connect(store_path(disk.folder))) as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    if not disk.mounted:
        pytest.skip("no small file system can be mounted here: all was well, but no disk was full")


def be_certain(monkeypatch):
    """All is over: what is not there now will not come."""
    monkeypatch.setattr(polling, "UNKNOWN_JOB_GRACE_S", 0.0)
    monkeypatch.setattr(polling, "FILE_SYNC_S", 0.0)
    monkeypatch.setattr(lost_submissions, "REQUEST_TIMEOUT_S", 0.0)


def llmb_run(*arguments):
    """In this process, where nobody waits any more; what it prints."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(arguments)
    assert (code, err.getvalue()) == (0, "")
    return out.getvalue()


def settled_table():
    for _ in range(2):  # a job found again by the first look is settled by the second
        out = llmb_run("jobs", "--json")
    return [json.loads(line) for line in out.splitlines()]


def steady(rows):
    kept = []
    for row in rows:
        unsteady = (*UNSTEADY, *OF_LOST_JOBS) if row["status"] == "lost" else UNSTEADY
        kept.append({name: value for name, value in row.items() if name not in unsteady})
    return sorted(kept, key=lambda row: row["run_dir"])


def differences(before, after):
    assert [row["run_dir"] for row in before] == [row["run_dir"] for row in after]
    pairs = [(old, new, name) for old, new in zip(before, after, strict=True) for name in old.keys() | new.keys()]
    return [(o["job_id"], name, o.get(name), n.get(name)) for o, n, name in pairs if o.get(name) != n.get(name)]


def check_accounts(lab, fault_injector, rows, runs):
    """Folders, rows, Slurm's own records and what users were told are about the same jobs."""
    by_folder = {row["run_dir"]: row for row in rows}
    assert len(by_folder) == len(rows)
    assert {row["job_id"] for row in rows if row["status"] in GOING} == set()
    assert by_folder.keys() <= runs.keys()
    for path in runs.keys() - by_folder.keys():  # a submitter was killed when it had made the folder and nothing else
        left = {part.name for part in runs[path].path.iterdir() if not part.name.startswith(".")}
        assert left <= {"config.json", "pid", "job.sh", "submission.json"}, path
    for told in fault_injector.told:
        assert by_folder[told["run_dir"]]["job_id"].partition("-")[0] == told["job_id"].partition("-")[0]
    completed = (lab.folder / "log/jobcomp.txt").read_text()
    assert set(re.findall(r" WorkDir=(\S+) ", completed)) <= by_folder.keys()
    folders = {read_submission(run).token: path for path, run in runs.items() if run.submission.exists()}
    for line in lab.call("squeue", "-h", "--states=all", "-o", "%i %k").splitlines():
        slurm_id, comment = line.split(" ", 1)
        row = by_folder[folders[comment]]
        assert (row["job_id"].partition("-")[0], row["status"] == "lost") == (slurm_id, False), row


def check_run(row, run, fault_injector):
    """Its status is what its events say, and they have every step."""
    events = [list(read(path)) for path in run.all_events()]
    for of_rank in events:
        steps = [event.step for event in of_rank if isinstance(event, StepDone)]
        assert steps == list(range(1, len(steps) + 1)), f"{run.work}: {steps}"
        assert sum(event.count for event in of_rank if isinstance(event, LogProblem)) <= 1
    ends = [event.status for event in events[0] if isinstance(event, RunEnded)] if events else []
    complete = len(events) == row["scale"] and all(last_step(of_rank) == 20 for of_rank in events)
    assert (row["status"] == "ok") == (complete and ends[-1:] == ["ok"]), row
    if run.work in fault_injector.killed:
        assert row["status"] != "ok", row
    if row["status"] == "lost":
        assert not ends, row
    else:
        result = read_json(run.result)
        assert (result["status"], result["reason"]) == (row["status"], row["reason"])
        assert row["status"] == "ok" or row["reason"], row


def last_step(events):
    return max((event.step for event in events if isinstance(event, StepDone)), default=0)
