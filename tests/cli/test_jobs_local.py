"""Local runs in `llmb-run jobs`: cancel, retry, watch on a terminal, and Slurm unavailable."""

import json
import os
import pty
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from llmb.cli.jobs.polling import Poller
from llmb.config.overrides import Setting
from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.events import RunEnded, StepDone, append
from llmb.launch.install_root import install_root
from llmb.launch.run_files.pid_file import write_pid_file
from llmb.launch.run_files.short_path import link_short_path
from llmb.launch.run_folder import RunFolder, store_path
from llmb.results.job_store import Store

SHAPE = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
RUN = [
    "submit", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--scale", "1", "--proxy", "--seqlen", "32",
    *(f"--set=model.{field}={value}" for field, value in SHAPE.items()),
]  # fmt: skip


@pytest.fixture
def store():
    with Store(store_path(install_root(os.environ))) as store:
        yield store


def test_slurm_unavailable_is_reported_once(store, recipes, monkeypatch, capsys):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    for number in (1, 2):
        temporary = store.add(config, Path(f"/{number}"), "slurm", status="submitting")
        store.submitted(temporary, str(number))
    monkeypatch.setenv("PATH", "/nowhere")
    poller = Poller(store)
    for _ in range(2):
        assert [job.status for job in poller.refresh(store.jobs())] == ["pending", "pending"]
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "Slurm is not installed on this machine" in errors
    assert "last known state, at submission, is shown" in errors


def test_a_running_job_says_how_far_it_is(store, recipes, llmb_run):
    settings = (Setting(field="steps", value="12", source="--set"),)
    request = RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small", settings=settings)
    config = resolve(recipes["pretrain_llama3.1"], request)
    run = RunFolder.create(install_root(os.environ), config, datetime.now())
    write_pid_file(run, os.getpid())
    for step in (1, 2, 3):
        append(run.events(0), StepDone(step=step, seconds=0.5, tokens=64, loss=8.0))
    job = store.add(config, run.path)
    out = llmb_run("jobs", "show", job)[1]
    assert f"{config.name}: incomplete (still running: 3 of 12 steps are done)" in out
    assert "killed" not in out


def test_failed_run_that_may_restart_stays_active_until_its_files_rest(store, recipes):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    work = replace(config.workload, checkpoint_every=2)
    config = replace(config, workload=work, limits=replace(config.limits, max_restarts=1))
    run = RunFolder.create(install_root(os.environ), config, datetime.now())
    append(run.events(0), RunEnded(time=time.time(), status="failed", reason="killed"))
    store.add(config, run.path)
    assert [job.status for job in Poller(store).refresh(store.jobs())] == ["running"]
    os.utime(run.events(0), (1.0, 1.0))
    assert [job.status for job in Poller(store).refresh(store.jobs())] == ["failed"]


@pytest.mark.slow
def test_watch_redraws_in_place_on_a_terminal(store, recipes):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    sleeper = subprocess.Popen(["sleep", "100"])
    run = RunFolder.create(install_root(os.environ), config, datetime.now())
    write_pid_file(run, sleeper.pid)
    store.add(config, run.path)
    screen, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "70", "LINES": "20"}
    watch = subprocess.Popen(
        [sys.executable, "-m", "llmb.cli.llmb_run", "jobs", "--watch"],
        stdout=terminal, stderr=terminal, stdin=terminal, env=environment,
    )  # fmt: skip
    os.close(terminal)
    text = ""
    with suppress(OSError):  # the other end is closed
        while chunk := os.read(screen, 65536).decode():
            text += chunk
            if "1 running" in text and sleeper.poll() is None:
                sleeper.kill()
                sleeper.wait()
    assert watch.wait() == 0
    assert "1 incomplete" in text
    assert "\x1b[7A" in text  # cursor up over the previous table
    assert max(len(line.rstrip("\r")) for line in text.splitlines()) <= 80


@pytest.mark.slow
def test_cancel_ends_a_local_run(llmb_run, store):
    running = subprocess.Popen(
        [sys.executable, "-m", "llmb.cli.llmb_run", *RUN, "--set", "steps=100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not list(install_root(os.environ).rglob("events.rank0.jsonl")):
        assert time.monotonic() < end
        assert running.poll() is None
        time.sleep(0.2)
    assert llmb_run("jobs", "cancel", "--all", "--on", "slurm") == (0, "", "no active run is selected\n")
    assert llmb_run("jobs", "cancel", "L1")[1] == "L1: cancelled\n"
    running.communicate(timeout=60)
    assert running.returncode == 2
    assert store.job("L1").status == "incomplete"


def test_a_job_is_named_by_its_id_its_folder_or_its_short_path(llmb_run, store, recipes, tmp_path):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    run = RunFolder.create(install_root(os.environ), config, datetime.now())
    append(run.events(0), RunEnded(time=time.time(), status="failed", reason="killed"))
    job_id = store.add(config, run.path)
    short = link_short_path(install_root(os.environ), job_id, run.path, run.config)
    for name in (job_id, run.path, short, short.name):
        assert llmb_run("jobs", "refresh", name)[:2] == (0, "L1: failed (killed)\n"), name
        assert llmb_run("jobs", "show", name)[1].startswith("job L1, failed (killed)\n")
        assert llmb_run("jobs", "log", name, "--dir")[0] == 0
        assert llmb_run("jobs", "cancel", name)[1] == "L1: has ended already\n"
    code, _, err = llmb_run("jobs", "show", tmp_path)
    assert (code, err) == (1, f"ERROR: no job '{tmp_path}'; the newest are: L1\n")


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_retry_of_what_the_engine_no_longer_runs_is_refused_at_the_desk(launcher, store, recipes, llmb_run):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    config = replace(config, workload=replace(config.workload, lr_decay_steps=config.workload.lr_warmup_steps))
    run = RunFolder.create(install_root(os.environ), config, datetime.now())
    job_id = store.add(config, run.path, launcher)
    store.note(job_id, status="failed")
    code, _, err = llmb_run("jobs", "retry", job_id)
    assert code == 1
    assert err.splitlines()[-1].startswith(f"ERROR: {job_id}: lr_decay_steps")
    assert [job.job_id for job in store.jobs()] == [job_id]


@pytest.mark.slow
def test_retry_of_a_local_run(llmb_run, store):
    assert llmb_run(*RUN, "--set", "steps=4")[0] == 0
    code, _, err = llmb_run("jobs", "retry", "L1")
    assert code == 0, err
    first, retry = store.jobs()
    assert (retry.job_id, retry.retry_of, retry.attempt, retry.name) == ("L2", "L1", 2, first.name)
    assert "attempt 2, retry of L1" in llmb_run("jobs", "show", "L2")[1]
    before = [json.loads(line) for line in llmb_run("jobs", "--json")[1].splitlines()]
    store_path(install_root(os.environ)).unlink()
    llmb_run("jobs", "rebuild")
    after = [json.loads(line) for line in llmb_run("jobs", "--json")[1].splitlines()]
    for row in (*before, *after):
        del row["created_at"], row["updated_at"]
    assert after == before
