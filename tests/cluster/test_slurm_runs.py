"""Real runs on a real Slurm: ranks on several nodes compute what they compute here, and every end has a name."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llmb.events import RequestDone, RunStarted, StepDone, read
from llmb.launch.rundir import RunDir
from llmb.plain import read_json
from llmb.recipes.recipe import shipped

pytestmark = pytest.mark.slurm
HOSTILE = 'it\'s "a" $HOME `b` %j 100%\nline'
CLUSTER = """
schema_version: 2
cluster_name: lab
gpu_type: cpu
environment: {GPUS_PER_NODE: "1", OMP_NUM_THREADS: "1", SITE_SAYS: "a 'b' $c"}
slurm: {common: {partition: main}, gpu: {}, cpu: {}}
"""
SHAPE = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
TINY = [f"--set=model.{field}={value}" for field, value in SHAPE.items()]
LLAMA = ["-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "fp32", "--proxy", *TINY, "--seqlen", "32"]
GROK = ["-w", "pretrain_grok1", "-s", "314b", "--dtype", "fp32", "--proxy", "--seqlen", "32", "--set=model.layers=2"]
NEMOTRON = ["-w", "pretrain_nemotronh", "-s", "56b", "--dtype", "fp32", "--proxy", "--seqlen", "64"]
DEEPSEEK = ["-w", "inference_deepseek-r1", "-s", "671b", "--dtype", "bf16", "--proxy"]
LONG = [*LLAMA, "--scale", "2", "--set", "steps=100000"]


@pytest.fixture
def install(slurm, tmp_path, monkeypatch) -> Path:
    """An installation whose runs go to the lab, one rank a node."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "cluster_config.yaml").write_text(CLUSTER)
    monkeypatch.setenv("LLMB_INSTALL", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


@pytest.fixture
def submit(install, llmb_run):
    """Sends one run to Slurm; gives its job and its folder."""

    def call(*arguments: str) -> tuple[str, RunDir]:
        code, out, err = llmb_run("submit", *arguments, "--json")
        assert code == 0, err
        sent = json.loads(out)
        return sent["job_id"], RunDir.open(Path(sent["run_dir"]))

    return call


def wait_for(condition, seconds: float = 240, what: str = "what was waited for"):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s"
        time.sleep(0.1)
    return found


def ended(slurm, job: str, run: RunDir) -> dict:
    """The result of a job that is over."""

    def over() -> bool:
        state = slurm.call("scontrol", "show", "job", job, "-o")
        return not any(word in state for word in ("JobState=PENDING", "JobState=RUNNING", "JobState=COMPLETING"))

    wait_for(over, what=f"the end of job {job}")
    run = RunDir.open(run.path)
    assert run.result.exists(), run.slurm_output(job).read_text()
    return read_json(run.result)


def given(slurm, job: str) -> tuple[int, str]:
    """How many nodes, and which, by Slurm's own word."""
    words = dict(word.partition("=")[::2] for word in slurm.call("scontrol", "show", "job", job, "-o").split())
    return int(words["NumNodes"]), words["NodeList"]


def steps(run: RunDir, rank: int = 0) -> list[StepDone]:
    return [event for event in read(run.events(rank)) if isinstance(event, StepDone)]


def stepping(run: RunDir) -> None:
    wait_for(lambda: len(steps(run)) >= 2 and steps(run, 1), what="the second step")


def facts(run: RunDir, ranks: int) -> list:
    """What must not depend on where ranks run: losses and norms of a training, answers of a served model."""
    found = []
    for rank in range(ranks):
        for event in read(run.events(rank)):
            if isinstance(event, StepDone):
                found.append((rank, event.step, event.tokens, event.loss, event.grad_norm))
            elif isinstance(event, RequestDone):
                found.append((rank, event.request, event.output_tokens, event.answer_crc, event.warmup, event.error))
    return sorted(found)


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        ([*LLAMA, "--set", "steps=3"], 2),
        pytest.param([*LLAMA, "--set", "steps=3"], 4, marks=pytest.mark.slow),
        pytest.param([*GROK, "--set", "steps=3"], 2, marks=pytest.mark.slow),
        pytest.param([*GROK, "--set", "steps=3"], 4, marks=pytest.mark.slow),
        pytest.param([*NEMOTRON, "--set", "steps=3"], 2, marks=pytest.mark.slow),
        pytest.param([*NEMOTRON, "--set", "steps=3"], 4, marks=pytest.mark.slow),
        pytest.param([*DEEPSEEK, "--set", "num_requests=4"], 2, marks=pytest.mark.slow),
    ],
    ids=["llama-2", "llama-4", "grok-2", "grok-4", "nemotron-2", "nemotron-4", "deepseek-2"],
)
def test_ranks_on_several_nodes_compute_what_they_compute_here(slurm, submit, llmb_run, run, ranks):
    asked = [*run, "--scale", str(ranks)]
    job, there = submit(*asked, "--env", "ODD=a 'b' $c\n`d`")
    result = ended(slurm, job, there)
    assert result["status"] == "ok", result
    code, out, err = llmb_run("submit", *asked, "--on", "local", "--json")
    assert code == 0, err
    [here] = [found for found in RunDir.find_all(there.install) if found.job_id == "L1"]
    assert facts(there, ranks) == facts(here, ranks) != []
    hosts = {event.host for rank in range(ranks) for event in read(there.events(rank)) if isinstance(event, RunStarted)}
    assert None not in hosts
    allocation = read_json(there.allocation)
    assert (allocation["job_id"], allocation["restarts"]) == (job, 0)
    assert given(slurm, job) == (ranks, allocation["nodes"])
    assert there.record(job).exists()
    assert json.loads(out)["status"] == "ok"


def test_a_killed_rank_is_named(slurm, submit):
    job, run = submit(*LONG)
    stepping(run)
    [victim] = [event.pid for event in read(run.events(1)) if isinstance(event, RunStarted)]
    os.kill(victim, signal.SIGKILL)
    result = ended(slurm, job, run)
    assert (result["status"], result["reason"]) == ("failed", "rank 1: killed by signal 9 (SIGKILL)")


def test_a_stopped_rank_hangs_the_run_and_is_found(slurm, submit):
    job, run = submit(*LONG, "--set", "stall_limit_s=8")
    stepping(run)
    [victim] = [event.pid for event in read(run.events(1)) if isinstance(event, RunStarted)]
    os.kill(victim, signal.SIGSTOP)
    result = ended(slurm, job, run)
    assert result["status"] == "failed"
    assert "hung: no rank made progress" in result["reason"]
    assert "rank 1 did not answer" in result["reason"]


@pytest.mark.parametrize(
    "command",
    [
        ["scancel", "--batch", "--signal=USR1", "JOB"],  # what --signal=B:USR1@60 makes Slurm do
        pytest.param(["scontrol", "update", "jobid=JOB", "timelimit=1"], marks=pytest.mark.slow),
    ],
    ids=["signal", "limit"],
)
def test_before_the_time_limit_a_run_ends_with_its_steps(slurm, submit, command):
    job, run = submit(*LONG)
    stepping(run)
    slurm.call(*(word.replace("JOB", job) for word in command))
    result = ended(slurm, job, run)
    assert (result["status"], result["reason"]) == ("timeout", "stopped shortly before Slurm's time limit")
    assert len(steps(run)) >= 2


def test_the_runs_own_limit_comes_first(slurm, submit):
    job, run = submit(*LONG, "--timeout", "12")
    result = ended(slurm, job, run)
    assert (result["status"], result["reason"]) == ("timeout", "stopped after the time limit of 12 s")


def test_a_cancelled_run_says_so(slurm, submit):
    job, run = submit(*LONG)
    stepping(run)
    slurm.call("scancel", job)
    result = ended(slurm, job, run)
    assert (result["status"], result["reason"]) == ("incomplete", "ended by Slurm with SIGTERM: cancelled")
    assert len(steps(run)) >= 2


@pytest.mark.slow
def test_a_requeued_job_works_in_a_folder_of_its_own(slurm, submit):
    job, run = submit(*LONG, "--slurm-arg", "requeue")
    stepping(run)
    slurm.call("scontrol", "requeue", job)
    again = wait_for(lambda: (found := RunDir.open(run.path)).restart and found, what="the restart")
    before = run.events(0).read_bytes()
    stepping(again)
    slurm.call("scancel", job)
    assert ended(slurm, job, run)["status"] == "incomplete"
    assert again.work == run.path / "restart-1"
    assert [step.step for step in steps(again)] == list(range(1, len(steps(again)) + 1))
    assert run.events(0).read_bytes() == before
    assert read_json(again.allocation)["restarts"] == 1


@pytest.mark.slow
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
    assert RunDir.open(run.path).restart == 0
    assert llmb_run("jobs", "--json")[1] == told


@pytest.mark.slow
def test_job_sh_by_hand_runs_in_a_new_folder(slurm, submit):
    job, run = submit(*LLAMA, "--scale", "2", "--set", "steps=2")
    assert ended(slurm, job, run)["status"] == "ok"
    before = sorted(run.path.rglob("*"))
    again = slurm.call("sbatch", "--parsable", f"--chdir={run.path}", str(run.job_script)).strip()
    wait_for(lambda: len(list(RunDir.of_experiment(run.path.parents[1]))) == 2)
    [other] = [found for found in RunDir.of_experiment(run.path.parents[1]) if found.path != run.path]
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
    run = wait_for(lambda: next(iter(RunDir.find_all(install)), None), what="a run folder")
    assert ended(slurm, job, run)["status"] == "ok", output.read_text()
    assert run.job_id == job
    assert given(slurm, job) == (2, read_json(run.allocation)["nodes"])
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
            run = RunDir.open(Path(one["run_dir"]))
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
