"""Real runs on a real Slurm: every end has a name, and whoever starts one ends in the same place."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from slurm_test_runs import LLAMA, LONG, TINY, ended, allocated_nodes, job_fields, wait_for_steps, steps, wait_for

from llmb.config.recipe import shipped
from llmb.config.serialization import read_json
from llmb.events import RunStarted, read
from llmb.launch.run_folder import RunFolder

pytestmark = pytest.mark.slurm


def test_a_killed_rank_is_named(slurm, submit):
    job, run = submit(*LONG)
    wait_for_steps(run)
    [victim] = [event.pid for event in read(run.events(1)) if isinstance(event, RunStarted)]
    os.kill(victim, signal.SIGKILL)
    result = ended(slurm, job, run)
    assert (result["status"], result["reason"]) == ("failed", "rank 1: killed by signal 9 (SIGKILL)")


@pytest.mark.nightly
def test_a_stopped_rank_hangs_the_run_and_is_found(slurm, submit):
    job, run = submit(*LONG, "--set", "stall_limit_s=8")
    wait_for_steps(run)
    [victim] = [event.pid for event in read(run.events(1)) if isinstance(event, RunStarted)]
    os.kill(victim, signal.SIGSTOP)
    result = ended(slurm, job, run)
    assert result["status"] == "failed"
    assert "hung: no rank made progress" in result["reason"]
    assert "rank 1 did not respond" in result["reason"]


def test_slurms_warning_ends_a_run_with_its_steps(slurm, submit):
    job, run = submit(*LONG)
    wait_for_steps(run)
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@60 makes Slurm do
    assert warned(ended(slurm, job, run))
    assert len(steps(run)) >= 2


@pytest.mark.nightly
def test_before_the_time_limit_a_run_ends_with_its_steps(slurm, submit):
    job, run = submit(*LONG)
    wait_for_steps(run)
    # Slurm looks at limits every 30 s: what is left must be more than that, or it kills without a warning.
    minutes = (running_s(slurm, job) + 45) // 60 + 1
    slurm.call("scontrol", "update", f"jobid={job}", f"timelimit={minutes}")
    assert warned(ended(slurm, job, run))
    assert len(steps(run)) >= 2


def warned(result: dict) -> bool:
    return (result["status"], result["reason"]) == ("timeout", "stopped shortly before Slurm's time limit")


def running_s(slurm, job: str) -> int:
    """How long a job has been running, by Slurm's own word."""
    hours, minutes, seconds = map(int, job_fields(slurm, job)["RunTime"].split(":"))
    return 3600 * hours + 60 * minutes + seconds


@pytest.mark.nightly
def test_the_runs_own_limit_comes_first(slurm, submit):
    job, run = submit(*LONG, "--timeout", "12")
    result = ended(slurm, job, run)
    assert (result["status"], result["reason"]) == ("timeout", "stopped after the time limit of 12 s")


def test_a_cancelled_run_says_so(slurm, submit):
    job, run = submit(*LONG)
    wait_for_steps(run)
    slurm.call("scancel", job)
    result = ended(slurm, job, run)
    assert (result["status"], result["reason"]) == ("incomplete", "ended by Slurm with SIGTERM: cancelled")
    assert len(steps(run)) >= 2


@pytest.mark.nightly
def test_a_requeued_job_works_in_a_folder_of_its_own(slurm, submit):
    job, run = submit(*LONG, "--slurm-arg", "requeue")
    wait_for_steps(run)
    slurm.call("scontrol", "requeue", job)
    again = wait_for(lambda: (found := RunFolder.open(run.path)).restart and found, what="the restart")
    before = run.events(0).read_bytes()
    wait_for_steps(again)
    slurm.call("scancel", job)
    assert ended(slurm, job, run)["status"] == "incomplete"
    assert again.work == run.path / "restart-1"
    assert [step.step for step in steps(again)] == list(range(1, len(steps(again)) + 1))
    assert run.events(0).read_bytes() == before
    assert read_json(again.allocation)["restarts"] == 1


@pytest.mark.nightly
def test_a_job_that_is_over_does_not_run_again(slurm, submit, llmb_run):
    """A controller that crashes before it has saved a job's end puts the job back into the queue."""
    job, run = submit(*LLAMA, "--scale", "1", "--set", "steps=2")
    assert ended(slurm, job, run)["status"] == "ok"
    told = llmb_run("jobs", "--json")[1]
    assert json.loads(told)["status"] == "ok"
    slurm.call("scontrol", "requeue", job)
    wait_for(lambda: "Restarts=1" in slurm.call("scontrol", "show", "job", job, "-o"), what="the requeue")
    assert ended(slurm, job, run)["status"] == "ok"
    assert f"ERROR: job {job} is over: ok; to have it run again: " in run.slurm_output(job).read_text()
    assert RunFolder.open(run.path).restart == 0
    assert llmb_run("jobs", "--json")[1] == told


@pytest.mark.nightly
def test_job_sh_by_hand_runs_in_a_new_folder(slurm, submit):
    job, run = submit(*LLAMA, "--scale", "2", "--set", "steps=2")
    assert ended(slurm, job, run)["status"] == "ok"
    before = sorted(run.path.rglob("*"))
    again = slurm.call("sbatch", "--parsable", f"--chdir={run.path}", str(run.job_script)).strip()
    wait_for(lambda: len(list(RunFolder.of_experiment(run.path.parents[1]))) == 2)
    [other] = [found for found in RunFolder.of_experiment(run.path.parents[1]) if found.path != run.path]
    assert ended(slurm, again, other)["status"] == "ok"
    assert other.job_id == again
    assert sorted(run.path.rglob("*")) == sorted([*before, run.slurm_output(again)])


@pytest.mark.slow
def test_launch_sh_in_an_allocation_ends_in_the_same_place(slurm, install, monkeypatch):
    script = shipped() / "pretrain_llama3.1" / "launch.sh"
    monkeypatch.setenv("JOB_TOTAL_GPUS", "2")
    monkeypatch.setenv("MODEL_SIZE", "8b")
    monkeypatch.setenv("DTYPE", "fp32")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    small = ["--proxy", *TINY, "--seqlen", "32", "--set", "steps=2"]
    output = install.parent / "out"
    sent = subprocess.run(
        ["sbatch", "--parsable", "--nodes=2", f"--output={output}", str(script), *small],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    job = sent.stdout.strip()
    run = wait_for(lambda: next(iter(RunFolder.find_all(install)), None), what="a run folder")
    assert ended(slurm, job, run)["status"] == "ok", output.read_text()
    assert run.job_id == job
    assert allocated_nodes(slurm, job) == (2, read_json(run.allocation)["nodes"])
    assert sorted(path.name for path in run.all_events()) == ["events.rank0.jsonl", "events.rank1.jsonl"]


def test_a_refused_job_is_remembered_with_slurms_words(slurm, install, llmb_run):
    code, _, err = llmb_run("submit", *LLAMA, "--scale", "2", "--slurm-arg", "partition=nowhere")
    assert code == 1
    assert "invalid partition specified: nowhere" in err.lower()
    code, out, _ = llmb_run("jobs", "--json")
    assert json.loads(out)["status"] == "failed"


def test_many_go_in_one_pass_and_each_has_its_folder(slurm, install, llmb_run):
    code, out, err = llmb_run("submit", *LLAMA, "--scale", "2", "--slurm-arg", "hold", "-r", "60", "--json")
    assert code == 0, err
    sent = [json.loads(line) for line in out.splitlines()]
    jobs = [one["job_id"] for one in sent]
    try:
        assert len(set(jobs)) == len({one["run_dir"] for one in sent}) == 60
        held = slurm.call("squeue", "--noheader", "--format=%i %k", f"--jobs={','.join(jobs)}").split()
        told = dict(zip(held[::2], held[1::2], strict=True))
        for one in sent:
            run = RunFolder.open(Path(one["run_dir"]))
            assert run.job_id == one["job_id"]
            assert read_json(run.submission)["token"] == told[one["job_id"]]
    finally:
        slurm.call("scancel", *jobs)


def test_slurm_understands_what_a_run_on_gpus_asks_for(slurm, install, llmb_run):
    (install / "cluster_config.yaml").write_text(
        "{schema_version: 2, gpu_type: h100, slurm: {common: {partition: main}, gpu: {gres: 8}}}"
    )
    asked = ["-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp8", "--scale", "16", "--slurm-arg", "hold"]
    wishes = ["--nice", "9", "--exclude", "n1", "--slurm-arg", "contiguous"]
    code, out, err = llmb_run("submit", *asked, *wishes, "--json")
    assert code == 0, err
    job = json.loads(out)["job_id"]
    try:
        told = slurm.call("scontrol", "show", "job", job, "-o")
    finally:
        slurm.call("scancel", job)
    for fact in ("NumNodes=2", "NumTasks=16", "TresPerNode=gres:gpu:8", "ExcNodeList=n1", "Nice=9", "Contiguous=1",
                 "TimeLimit=00:33:00", "MinMemoryNode=0", "OverSubscribe=NO"):  # fmt: skip
        assert fact in told
