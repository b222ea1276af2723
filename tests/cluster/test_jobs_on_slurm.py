"""`llmb-run jobs` with real Slurm daemons: states, outcomes, outages, lost jobs, cancel, retry, rebuild."""

import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from llmb.cli.jobs import lost_submissions, polling
from llmb.cli.jobs.auto_retry import retry_failed
from llmb.cli.jobs.job_outcome import read_job_outcome
from llmb.cli.jobs.polling import Poller
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, RunStarted, StepDone, append
from llmb.launch.install_root import install_root
from llmb.launch.run_files.short_path import short_paths
from llmb.launch.run_folder import RunFolder, store_path
from llmb.launch.slurm import slurm_jobs as programs
from llmb.launch.slurm.submission import Submission, new_token, read_submission, write_submission
from llmb.results.job_store import Store

pytestmark = pytest.mark.slurm
TIMEOUT_S = 180.0
WAIT_FOR_GO = "touch began; until [ -e go ]; do sleep 0.1; done"


@pytest.fixture(scope="module")
def config(recipes):
    return resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))


@pytest.fixture
def store():
    with Store(store_path(install_root(os.environ))) as store:
        yield store


@pytest.fixture(autouse=True)
def shared_file_system(monkeypatch):
    """Writes of a node are visible at once."""
    monkeypatch.setattr(polling, "FILE_SYNC_S", 0.5)


class Jobs:
    """Creates run folders and submits small scripts for them, as `submit` does with real runs."""

    def __init__(self, store, config):
        self.store, self.config = store, config

    def folder(self, **lineage):
        run = RunFolder.create(install_root(os.environ), self.config, datetime.now())
        write_submission(run, Submission(token=new_token(), **lineage))
        return run

    def sbatch(self, run, script, *arguments):
        run.write_job_script(f"#!/bin/bash\n{script}\n")
        comment = f"--comment={read_submission(run).token}"
        return programs.submit(run.job_script, [f"--chdir={run.path}", "--output=slurm-%j.out", comment, *arguments])

    def submit(self, script, *arguments, sbatch_overrides=None, **lineage):
        """Submit a job with its row and record; return its id and folder, which holds events for the script to copy."""
        run = self.folder(sbatch_overrides=sbatch_overrides or {}, **lineage)
        prepare_events(run, self.config)
        temporary = self.store.add(self.config, run.path, "slurm", status="submitting", **lineage)
        slurm_id = self.sbatch(run, script, *arguments)
        run.write_record(self.config, slurm_id, "slurm")
        return self.store.submitted(temporary, slurm_id), run


@pytest.fixture
def jobs(slurm, store, config):
    return Jobs(store, config)


def prepare_events(run, config):
    """Write the events of a successful rank to a file that the script of a job copies."""
    path = run.path / "prepared"
    append(path, RunStarted(time=1.0, host="n1", world_size=1))
    for step in range(1, config.workload.steps + 1):
        append(path, StepDone(step=step, seconds=2.0, tokens=1000))
    append(path, RunEnded(time=2.0, status="ok"))


def until(condition):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)


def wait(store, job_id, *statuses):
    poller, end = Poller(store), time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        (job,) = poller.refresh([store.job(job_id)])
        if job.status in statuses:
            return job
        time.sleep(0.2)
    raise AssertionError(f"{job_id} is {job.status} ({job.reason}, {job.slurm_state}), not {statuses}")


def rows(llmb_run):
    """Return the rows of `jobs --json` without their timestamps."""
    all_rows = [json.loads(line) for line in llmb_run("jobs", "--json")[1].splitlines()]
    timestamps = ("created_at", "updated_at", "refreshed_at")
    return sorted(
        ({k: v for k, v in row.items() if k not in timestamps} for row in all_rows), key=lambda r: r["job_id"]
    )


def test_job_from_pending_to_its_result(jobs, store, llmb_run):
    held, _ = jobs.submit("true", "--hold")
    job_id, run = jobs.submit(f"{WAIT_FOR_GO}; sleep 2; cp prepared events.rank0.jsonl", "--hold")
    pending = wait(store, job_id, "pending")
    assert (pending.slurm_state, pending.reason, pending.started_at) == ("PENDING", "JobHeldUser", None)
    subprocess.run(["scontrol", "release", job_id], check=True)
    running = wait(store, job_id, "running")
    assert running.nodes.startswith("n")
    (run.path / "go").touch()
    job = wait(store, job_id, "ok")
    assert (job.step_time_s, job.tokens_per_s_per_gpu, job.slurm_state) == (2.0, 500.0, "COMPLETED")
    assert job.submitted_at <= job.started_at <= job.ended_at - 2
    assert job.ended_at <= time.time()
    assert json.loads(run.result.read_text())["status"] == "ok"
    assert read_job_outcome(run).nodes == job.nodes
    out = llmb_run("jobs", "--on", "slurm")[1]
    assert "COMPLETED" in out
    assert "JobHeldUser" in llmb_run("jobs", "refresh", held)[1]


def test_many_jobs_are_one_query(jobs, store, tmp_path, monkeypatch):
    ids = [jobs.submit("true", "--hold")[0] for _ in range(5)]
    wrappers = tmp_path / "bin"
    wrappers.mkdir()
    real = subprocess.check_output(["which", "squeue"], text=True).strip()
    (wrappers / "squeue").write_text(f'#!/bin/bash\necho >> {tmp_path}/calls\nexec {real} "$@"\n')
    (wrappers / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrappers}:{os.environ['PATH']}")
    Poller(store).refresh([store.job(job_id) for job_id in ids])
    assert (tmp_path / "calls").read_text() == "\n"


def test_job_without_events_is_diagnosed_from_its_slurm_state(jobs, store):
    job_id, run = jobs.submit("exit 3")
    job = wait(store, job_id, "failed", "incomplete")
    assert (job.status, job.slurm_state) == ("failed", "FAILED")
    assert "exit code 3" in job.reason
    assert json.loads(run.result.read_text())["reason"] == job.reason


@pytest.mark.nightly
def test_slurm_unavailable_keeps_the_rows(jobs, slurm, store, capsys):
    job_id, run = jobs.submit(f"{WAIT_FOR_GO}; cp prepared events.rank0.jsonl")
    until((run.path / "began").exists)
    wait(store, job_id, "running")
    slurm.stop_controller()
    (job,) = Poller(store).refresh([store.job(job_id)])
    assert job.status == "running"
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert errors.startswith("ERROR: Slurm does not respond")
    assert "s ago" in errors
    slurm.start_controller()
    (run.path / "go").touch()
    assert wait(store, job_id, "ok").step_time_s == 2.0


def test_forgotten_job_is_lost_until_its_folder_has_events(jobs, store, config):
    run = jobs.folder()
    temporary = store.add(config, run.path, "slurm", status="submitting")
    job_id = store.submitted(temporary, "999999")
    store.note(job_id, status="running")
    assert Poller(store).refresh([store.job(job_id)])[0].status == "running"  # it was just seen
    long_ago = time.time() - 2 * polling.UNKNOWN_JOB_GRACE_S
    store.note(job_id, created_at=long_ago, submitted_at=long_ago)
    (job,) = Poller(store).refresh([store.job(job_id)])
    assert job.status == "lost"
    assert "no longer knows it" in job.reason
    prepare_events(run, config)
    (run.path / "prepared").rename(run.events(0))
    (job,) = Poller(store).refresh([job])
    assert (job.status, job.step_time_s, job.slurm_state) == ("ok", 2.0, None)


def test_job_whose_id_was_reused_is_lost(jobs, store):
    """A controller that lost its newest jobs assigns their ids again."""
    reused_id, _ = jobs.submit("sleep 60")
    run = jobs.folder()
    store.note(reused_id, job_id=f"{reused_id}-2")
    long_ago = time.time() - 2 * polling.UNKNOWN_JOB_GRACE_S
    store.add(jobs.config, run.path, "slurm", reused_id, status="running", created_at=long_ago)
    (job,) = Poller(store).refresh([store.job(reused_id)])
    assert job.status == "lost"


def test_job_of_a_killed_submitter_is_found_by_its_comment_or_its_output(jobs, store, config):
    by_comment, by_output = jobs.folder(), jobs.folder()
    ids = [jobs.sbatch(by_comment, "true", "--hold"), jobs.sbatch(by_output, "sleep 30")]
    for run in (by_comment, by_output):
        store.add(config, run.path, "slurm", status="submitting")
    until(by_output.slurm_output(ids[1]).exists)
    write_submission(by_output, Submission(token=new_token()))  # so that it cannot be found by its comment
    recovered = Poller(store).refresh(store.jobs())
    assert [job.job_id for job in recovered] == ids
    assert recovered[0].status == "pending"


def test_job_that_was_never_submitted_fails_after_the_request_timeout(jobs, store, config, llmb_run):
    run = jobs.folder()
    temporary = store.add(config, run.path, "slurm", status="submitting")
    assert Poller(store).refresh(store.jobs())[0].status == "submitting"
    store.note(temporary, created_at=time.time() - 2 * lost_submissions.REQUEST_TIMEOUT_S)
    (job,) = Poller(store).refresh(store.jobs())
    assert (job.status, job.reason) == ("failed", lost_submissions.NEVER_SUBMITTED)
    before = rows(llmb_run)
    assert llmb_run("jobs", "rebuild")[0] == 0
    assert rows(llmb_run) == before


def test_refused_job_keeps_its_reason(slurm, llmb_run, monkeypatch, tmp_path):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    code, _, err = llmb_run(
        "submit", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--scale", "1", "--proxy", "--on", "slurm",
        "--slurm-arg", "partition=nowhere",
    )  # fmt: skip
    assert code == 1
    assert "invalid partition" in err
    (row,) = rows(llmb_run)
    assert row["status"] == "failed"
    assert "invalid partition" in row["reason"]
    llmb_run("jobs", "rebuild")
    assert rows(llmb_run) == [row]


def test_cancel_named_and_filtered_jobs(jobs, store, llmb_run):
    ids = [jobs.submit("sleep 60", "--hold")[0], jobs.submit("sleep 60")[0]]
    pending, _ = jobs.submit("sleep 60", "--hold")
    wait(store, ids[1], "running")
    code, out, err = llmb_run("jobs", "cancel", *ids)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == sorted(f"{job_id}: cancelled" for job_id in ids)
    for job_id in ids:
        job = wait(store, job_id, "incomplete")
        assert job.slurm_state == "CANCELLED"
        assert "cancelled" in job.reason
    assert wait(store, pending, "pending")
    code, out, _ = llmb_run("jobs", "cancel", "--all", "--status", "pending", "--on", "slurm")
    assert out == f"{pending}: cancelled\n"
    assert wait(store, pending, "incomplete")


def test_retry_excludes_the_failed_node(jobs, slurm, store, llmb_run, capsys):
    sbatch_overrides = {"arguments": ["hold"], "exclude": "n4"}
    job_id, run = jobs.submit(
        "sleep 100", "--nodelist=n2", "--no-requeue", retries=2, sbatch_overrides=sbatch_overrides
    )
    wait(store, job_id, "running")
    slurm.down("n2")
    job = wait(store, job_id, "failed")
    assert (job.slurm_state, read_job_outcome(run).failure) == ("NODE_FAIL", "node_failure")
    assert "to retry" in llmb_run("jobs")[2]
    (new_id,) = retry_failed(store)
    assert retry_failed(store) == []
    new = store.job(new_id)
    assert (new.retry_of, new.attempt, new.retries, new.workload) == (job_id, 2, 1, job.workload)
    assert new.run_dir != job.run_dir
    submission = read_submission(RunFolder.open(Path(new.run_dir)))
    assert submission.sbatch_overrides["exclude"] == "n4,n2"
    assert wait(store, new_id, "pending")
    output = llmb_run("jobs", "show", job_id)[1]
    assert f"retried as {new_id}" in output
    assert "Slurm: NODE_FAIL, on n2, waited 0:0" in output


def test_retry_command(jobs, slurm, store, llmb_run):
    sbatch_overrides = {"arguments": ["hold"]}
    job_id, _ = jobs.submit("exit 1", "--hold", sbatch_overrides=sbatch_overrides)
    code, _, err = llmb_run("jobs", "retry", job_id)
    assert code == 1
    assert "cancel it first" in err
    slurm.call("scontrol", "release", job_id)
    wait(store, job_id, "failed")
    code, out, err = llmb_run("jobs", "retry", job_id, "--exclude-node", "n3")
    assert (code, err) == (0, "")
    new_id = out.split()[-1]
    assert (store.job(new_id).retry_of, store.job(new_id).attempt) == (job_id, 2)
    assert "n3" in subprocess.check_output(["scontrol", "show", "job", new_id], text=True)


def test_rebuild_gives_the_same_table(jobs, store, llmb_run):
    good, _ = jobs.submit("cp prepared events.rank0.jsonl; sleep 1", retries=1)
    bad, _ = jobs.submit("exit 1", retries=1)
    held, _ = jobs.submit("true", "--hold", retries=3)
    retry, _ = jobs.submit("true", "--hold", retry_of=bad, attempt=2)
    wait(store, good, "ok")
    wait(store, bad, "failed")
    for job_id in (held, retry):
        wait(store, job_id, "pending")
    before = rows(llmb_run)
    assert len(before) == 4
    store_path(install_root(os.environ)).unlink()
    assert llmb_run("jobs", "rebuild")[1].startswith("4 runs found")
    assert rows(llmb_run) == before


def test_watch_prints_changes_and_ends(jobs, tmp_path):
    _, run = jobs.submit(f"{WAIT_FOR_GO}; cp prepared events.rank0.jsonl")
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as to_out, err.open("w") as to_err:
        command = [sys.executable, "-m", "llmb.cli.llmb_run", "jobs", "--watch"]
        environ = dict(os.environ)  # without COLUMNS, which readline, loaded by pytest, puts into the C environment
        watch = subprocess.Popen(command, env=environ, stdout=to_out, stderr=to_err)
    until(lambda: "x1*: running" in out.read_text() or watch.poll() is not None)
    (run.path / "go").touch()
    assert (watch.wait(TIMEOUT_S), err.read_text()) == (0, "")
    *_, before, last = [line for line in out.read_text().splitlines() if "x1*: " in line]
    assert "x1*: running" in before
    assert "x1*: ok 500 tokens/s/gpu" in last
    assert "COMPLETED" in out.read_text()


def test_log_is_followed_until_the_job_has_ended(jobs, slurm):
    job_id, run = jobs.submit(
        "cp prepared events.rank0.jsonl; echo before; sleep 1; for i in 1 2 3; do echo line $i >> log; sleep 0.5; done",
        "--hold",
    )
    (run.path / "log").symlink_to(run.log.name)
    slurm.call("scontrol", "release", job_id)
    follow = subprocess.run(
        [sys.executable, "-m", "llmb.cli.llmb_run", "jobs", "log", job_id, "-f"],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert follow.returncode == 0, follow.stderr
    assert follow.stdout.splitlines()[-3:] == ["line 1", "line 2", "line 3"]


@pytest.mark.slow
def test_ten_concurrent_submitters_lose_no_job(slurm, store, tmp_path):
    command = [
        sys.executable, "-m", "llmb.cli.llmb_run", "submit", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32",
        "--scale", "1", "--proxy", "--on", "slurm", "--slurm-arg", "hold", "-r", "3", "--yes",
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    folder = tmp_path / "work"
    folder.mkdir()
    submitters = [subprocess.Popen(command, cwd=folder, **pipes) for _ in range(10)]
    outputs = [submitter.communicate(timeout=10 * TIMEOUT_S) for submitter in submitters]
    assert [submitter.returncode for submitter in submitters] == [0] * 10, outputs
    queued = slurm.call("squeue", "-h", "-o", "%i", "--states=pending").split()
    jobs = store.jobs()
    assert len(jobs) == len({job.run_dir for job in jobs}) == 30
    assert {job.job_id for job in jobs} <= set(queued)


@pytest.mark.slow
def test_real_run_from_submit_to_the_table(slurm, llmb_run, monkeypatch, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    shape = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
    code, out, err = llmb_run(
        "submit", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--scale", "2", "--proxy", "--seqlen", "32",
        *(f"--set=model.{field}={value}" for field, value in shape.items()), "--set=steps=4", "--on", "slurm", "--json",
    )  # fmt: skip
    assert code == 0, err
    job_id = json.loads(out.splitlines()[-1])["job_id"]
    code, log, _ = llmb_run("jobs", "log", job_id, "-f")
    assert code == 0
    assert "iteration" in log
    code, out, err = llmb_run("jobs", "--watch")
    assert (code, err) == (0, "")
    (row,) = rows(llmb_run)
    assert (row["job_id"], row["status"], row["slurm_state"]) == (job_id, "ok", "COMPLETED")
    assert row["tokens_per_s_per_gpu"] > 0
    short = short_paths(install_root(os.environ)) / f"{job_id}-llama3.1-8b-fp32-gpus2-proxy"
    assert short.samefile(row["run_dir"])
    assert RunFolder.open(short).read_config().predicted.memory_gib > 0
    store_path(install_root(os.environ)).unlink()
    llmb_run("jobs", "rebuild")
    assert rows(llmb_run) == [row]
