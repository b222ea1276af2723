"""Real runs on a real Slurm: every outcome is named, and every way to start a run writes the same folder."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from slurm_test_runs import (
    LLAMA,
    LONG,
    TINY,
    allocated_nodes,
    job_fields,
    steps,
    wait_for,
    wait_for_result,
    wait_for_steps,
)

from llmb.config.recipe import shipped
from llmb.config.serialization import read_json
from llmb.events import RunStarted, read
from llmb.launch.procfs import find_process
from llmb.launch.run_folder import RunFolder

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("reported_late", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_killed_rank_is_reported(slurm, submit, reported_late):
    """Also if its node tells srun of it after the peer that lost the connection has exited."""
    job, run = submit(*LONG, "--no-report")
    wait_for_steps(run)
    [victim] = [event.pid for event in read(run.events(1)) if isinstance(event, RunStarted)]
    if reported_late:
        slurmstepd = find_process(victim).parent
        os.kill(slurmstepd, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: "task 0: Exited" in run.log.read_text(), event="the exit of rank 0")
        os.kill(slurmstepd, signal.SIGCONT)
    else:
        os.kill(victim, signal.SIGKILL)
    result = wait_for_result(slurm, job, run)
    assert (result["status"], result["reason"]) == ("failed", "rank 1: killed by signal 9 (SIGKILL)")
    assert not run.report_page.exists()


@pytest.mark.nightly
def test_stopped_rank_hangs_the_run_and_is_reported(slurm, submit):
    job, run = submit(*LONG, "--set", "stall_limit_s=8")
    wait_for_steps(run)
    [victim] = [event.pid for event in read(run.events(1)) if isinstance(event, RunStarted)]
    os.kill(victim, signal.SIGSTOP)
    result = wait_for_result(slurm, job, run)
    assert result["status"] == "failed"
    assert "hung: no rank made progress" in result["reason"]
    assert "rank 1 did not respond" in result["reason"]


def test_time_limit_signal_ends_a_run_and_keeps_its_steps(slurm, submit):
    job, run = submit(*LONG)
    wait_for_steps(run)
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # the effect of --signal=B:USR1@60
    assert stopped_before_limit(wait_for_result(slurm, job, run))
    assert len(steps(run)) >= 2


@pytest.mark.nightly
def test_run_ends_before_the_time_limit_and_keeps_its_steps(slurm, submit):
    job, run = submit(*LONG)
    wait_for_steps(run)
    # Slurm checks limits every 30 s: the remaining time must be longer, or it kills without the signal.
    minutes = (running_s(slurm, job) + 45) // 60 + 1
    slurm.call("scontrol", "update", f"jobid={job}", f"timelimit={minutes}")
    assert stopped_before_limit(wait_for_result(slurm, job, run))
    assert len(steps(run)) >= 2


def stopped_before_limit(result: dict) -> bool:
    return (result["status"], result["reason"]) == ("timeout", "stopped shortly before Slurm's time limit")


def running_s(slurm, job: str) -> int:
    """Return the run time of a job in seconds."""
    hours, minutes, seconds = map(int, job_fields(slurm, job)["RunTime"].split(":"))
    return 3600 * hours + 60 * minutes + seconds


@pytest.mark.nightly
def test_time_limit_of_the_run_itself(slurm, submit):
    job, run = submit(*LONG, "--timeout", "12")
    result = wait_for_result(slurm, job, run)
    assert (result["status"], result["reason"]) == ("timeout", "stopped after the time limit of 12 s")


def test_cancelled_run_is_incomplete(slurm, submit):
    job, run = submit(*LONG)
    wait_for_steps(run)
    slurm.call("scancel", job)
    result = wait_for_result(slurm, job, run)
    assert (result["status"], result["reason"]) == ("incomplete", "ended by Slurm with SIGTERM: cancelled")
    assert len(steps(run)) >= 2


@pytest.mark.nightly
def test_requeued_job_works_in_a_restart_folder(slurm, submit):
    job, run = submit(*LONG, "--slurm-arg", "requeue")
    wait_for_steps(run)
    slurm.call("scontrol", "requeue", job)
    restarted = wait_for(lambda: (folder := RunFolder.open(run.path)).restart and folder, event="the restart")
    before = run.events(0).read_bytes()
    wait_for_steps(restarted)
    slurm.call("scancel", job)
    assert wait_for_result(slurm, job, run)["status"] == "incomplete"
    assert restarted.work == run.path / "restart-1"
    assert [step.step for step in steps(restarted)] == list(range(1, len(steps(restarted)) + 1))
    assert run.events(0).read_bytes() == before
    assert read_json(restarted.allocation)["restarts"] == 1


@pytest.mark.nightly
def test_ended_job_does_not_run_again(slurm, submit, llmb_run):
    """A controller that crashes before it has saved the end of a job requeues it."""
    job, run = submit(*LLAMA, "--scale", "1", "--set", "steps=2")
    assert wait_for_result(slurm, job, run)["status"] == "ok"
    rows = llmb_run("jobs", "--json")[1]
    assert json.loads(rows)["status"] == "ok"
    slurm.call("scontrol", "requeue", job)
    wait_for(lambda: "Restarts=1" in slurm.call("scontrol", "show", "job", job, "-o"), event="the requeue")
    assert wait_for_result(slurm, job, run)["status"] == "ok"
    assert f"ERROR: job {job} has ended: ok; to run it again: " in run.slurm_output(job).read_text()
    assert RunFolder.open(run.path).restart == 0
    assert llmb_run("jobs", "--json")[1] == rows


@pytest.mark.nightly
def test_job_sh_submitted_by_hand_runs_in_a_new_folder(slurm, submit):
    job, run = submit(*LLAMA, "--scale", "2", "--set", "steps=2")
    assert wait_for_result(slurm, job, run)["status"] == "ok"
    before = sorted(run.path.rglob("*"))
    new_job = slurm.call("sbatch", "--parsable", f"--chdir={run.path}", str(run.job_script)).strip()
    wait_for(lambda: len(list(RunFolder.of_experiment(run.path.parents[1]))) == 2)
    [new_run] = [folder for folder in RunFolder.of_experiment(run.path.parents[1]) if folder.path != run.path]
    assert wait_for_result(slurm, new_job, new_run)["status"] == "ok"
    assert new_run.job_id == new_job
    assert sorted(run.path.rglob("*")) == sorted([*before, run.slurm_output(new_job)])


@pytest.mark.slow
def test_launch_sh_in_an_allocation_writes_the_same_run_folder(slurm, install, monkeypatch):
    script = shipped() / "pretrain_llama3.1" / "launch.sh"
    monkeypatch.setenv("JOB_TOTAL_GPUS", "2")
    monkeypatch.setenv("MODEL_SIZE", "8b")
    monkeypatch.setenv("DTYPE", "fp32")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    small = ["--proxy", *TINY, "--seqlen", "32", "--set", "steps=2"]
    output = install.parent / "out"
    done = subprocess.run(
        ["sbatch", "--parsable", "--nodes=2", f"--output={output}", str(script), *small],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    job = done.stdout.strip()
    run = wait_for(lambda: next(iter(RunFolder.find_all(install)), None), event="a run folder")
    assert wait_for_result(slurm, job, run)["status"] == "ok", output.read_text()
    assert run.job_id == job
    assert allocated_nodes(slurm, job) == (2, read_json(run.allocation)["nodes"])
    assert sorted(path.name for path in run.all_events()) == ["events.rank0.jsonl", "events.rank1.jsonl"]


def test_refused_job_is_stored_with_slurms_message(slurm, install, llmb_run):
    code, _, err = llmb_run("submit", *LLAMA, "--scale", "2", "--slurm-arg", "partition=nowhere")
    assert code == 1
    assert "invalid partition specified: nowhere" in err.lower()
    code, out, _ = llmb_run("jobs", "--json")
    assert json.loads(out)["status"] == "failed"


def test_many_jobs_of_one_submission_have_their_own_folders(slurm, install, llmb_run):
    code, out, err = llmb_run("submit", *LLAMA, "--scale", "2", "--slurm-arg", "hold", "-r", "60", "--yes", "--json")
    assert code == 0, err
    submissions = [json.loads(line) for line in out.splitlines()]
    jobs = [submission["job_id"] for submission in submissions]
    try:
        assert len(set(jobs)) == len({submission["run_dir"] for submission in submissions}) == 60
        words = slurm.call("squeue", "--noheader", "--format=%i %k", f"--jobs={','.join(jobs)}").split()
        tokens = dict(zip(words[::2], words[1::2], strict=True))
        for submission in submissions:
            run = RunFolder.open(Path(submission["run_dir"]))
            assert run.job_id == submission["job_id"]
            assert read_json(run.submission)["token"] == tokens[submission["job_id"]]
    finally:
        slurm.call("scancel", *jobs)


def test_slurm_accepts_the_options_of_a_gpu_run(slurm, install, llmb_run):
    (install / "cluster_config.yaml").write_text(
        "{schema_version: 2, gpu_type: h100, slurm: {common: {partition: main}, gpu: {gres: 8}}}"
    )
    run = ["-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp8", "--scale", "16", "--slurm-arg", "hold"]
    sbatch_options = ["--nice", "9", "--exclude", "n1", "--slurm-arg", "contiguous"]
    code, out, err = llmb_run("submit", *run, *sbatch_options, "--json")
    assert code == 0, err
    job = json.loads(out)["job_id"]
    try:
        fields = slurm.call("scontrol", "show", "job", job, "-o")
    finally:
        slurm.call("scancel", job)
    for fact in ("NumNodes=2", "NumTasks=16", "TresPerNode=gres:gpu:8", "ExcNodeList=n1", "Nice=9", "Contiguous=1",
                 "TimeLimit=00:33:00", "MinMemoryNode=0", "OverSubscribe=NO"):  # fmt: skip
        assert fact in fields
