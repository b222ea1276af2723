"""Diagnosis of jobs that fail on a real Slurm in every way, from their state and log alone."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_lab import SlurmLab, unavailable_reason

from llmb.launch.failure import Failure, diagnose
from llmb.launch.slurm.slurm_jobs import JobState, states

pytestmark = pytest.mark.slurm
DEADLINE_S = 180.0
# One task on each of two nodes: it records its node, runs a command, and sleeps.
TASKS = "srun --kill-on-bad-exit=1 bash -c 'echo $SLURMD_NODENAME > started.$SLURM_PROCID; {}; sleep 60'"


class Jobs:
    """Submits jobs in a folder and diagnoses their failures."""

    def __init__(self, lab: SlurmLab, folder: Path):
        self.lab, self.folder = lab, folder

    def submit(self, command: str = ":", *options: str, nodes: int = 2) -> str:
        output = [f"--chdir={self.folder}", "--output=slurm-%j.out", "--no-requeue"]
        size = [f"--nodes={nodes}", "--ntasks-per-node=1"]
        return self.lab.call("sbatch", "--parsable", *output, *size, *options, "--wrap", TASKS.format(command)).strip()

    def node_of(self, rank: int) -> str:
        """Wait for the start of a rank and return its node."""
        file = self.folder / f"started.{rank}"
        return wait_for(lambda: file.read_text().strip() if file.exists() else "")

    def state(self, job_id: str) -> JobState | None:
        """Return the final state of a job; None: it is active."""
        state = states([job_id]).get(job_id)
        left_queue = self.lab.call("squeue", "-h", "-j", job_id, check=False) == ""  # its log is complete by then
        return state if left_queue and state is not None and state.phase == "ended" else None

    def failure(self, job_id: str) -> Failure:
        """Wait for the end of a job and return its failure."""
        state = wait_for(lambda: self.state(job_id))
        failure = diagnose(None, state, (self.folder / f"slurm-{job_id}.out").read_text())
        assert failure is not None, state
        return failure


def wait_for(condition: Callable):
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


@pytest.fixture
def jobs(slurm, tmp_path):
    return Jobs(slurm, tmp_path)


def test_node_down(jobs):
    job = jobs.submit()
    node = jobs.node_of(1)
    jobs.lab.down(node)
    failure = jobs.failure(job)
    assert failure == Failure("node_failure", f"node {node} went down (NODE_FAIL)", True, (node,))


def test_node_of_the_batch_script_down(jobs):
    job = jobs.submit()
    node = jobs.node_of(0)
    jobs.lab.down(node)
    failure = jobs.failure(job)
    assert (failure.kind, failure.retryable) == ("node_failure", True)
    assert failure.excluded_nodes in ((), (node,))  # its log may be lost with it


@pytest.mark.nightly
def test_node_crash(jobs):
    job = jobs.submit("sleep 120")
    node = jobs.node_of(1)
    jobs.lab.crash_node(node)
    failure = jobs.failure(job)
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == ("node_failure", True, (node,))


def test_cancelled_job(jobs):
    job = jobs.submit()
    jobs.node_of(1)
    jobs.lab.call("scancel", job)
    assert jobs.failure(job) == Failure("cancelled", "the job was cancelled (CANCELLED)", False, ())


def test_cancelled_pending_job(jobs):
    job = jobs.submit(":", "--begin=now+1hour")
    jobs.lab.call("scancel", job)
    state = wait_for(lambda: jobs.state(job))
    assert diagnose(None, state).kind == "cancelled"


def test_killed_rank(jobs):
    job = jobs.submit("if [ $SLURM_PROCID = 1 ]; then sleep 1; kill -9 $$; fi")
    failure = jobs.failure(job)
    assert (failure.kind, failure.retryable) == ("killed", False)
    assert failure.reason.endswith(f"srun: error: {jobs.node_of(1)}: task 1: Killed")


def test_rank_exits_with_an_error(jobs):
    job = jobs.submit("if [ $SLURM_PROCID = 1 ]; then sleep 1; exit 3; fi")
    reason = f"task 1 on {jobs.node_of(1)}: Exited with exit code 3"
    assert jobs.failure(job) == Failure("program_error", reason, False, ())


def test_more_tasks_than_allocated(jobs):
    job = jobs.lab.call(
        "sbatch", "--parsable", f"--chdir={jobs.folder}", "--output=slurm-%j.out", "--wrap", "srun -n 64 true"
    ).strip()
    assert jobs.failure(job).kind == "refused"


@pytest.fixture(scope="module")
def strict_lab(tmp_path_factory):
    """Slurm lab that enforces memory limits and preempts jobs."""
    if reason := unavailable_reason(cgroup=True):
        pytest.skip(reason)
    settings = {"PreemptType": "preempt/partition_prio", "PreemptMode": "CANCEL"}
    with SlurmLab(tmp_path_factory.mktemp("strict"), nodes=2, cgroup=True, settings=settings) as lab:
        lab.call("scontrol", "create", "PartitionName=urgent", "Nodes=ALL", "PriorityTier=9", "PreemptMode=off")
        yield lab


@pytest.fixture
def strict_jobs(strict_lab, tmp_path, monkeypatch):
    for name, value in strict_lab.environment.items():
        monkeypatch.setenv(name, value)
    return Jobs(strict_lab, tmp_path)


ALLOCATE_300_MIB = 'if [ $SLURM_PROCID = {} ]; then sleep 1; exec python3 -c "x = bytearray(300 << 20)"; fi'


def test_oom_killed_rank(strict_jobs):
    """Slurm itself reports only FAILED, as the batch step did nothing wrong."""
    job = strict_jobs.submit(ALLOCATE_300_MIB.format(1), "--mem=100")
    failure = strict_jobs.failure(job)
    assert (failure.kind, failure.retryable, failure.excluded_nodes) == ("oom_kill", False, ())
    assert f" on {strict_jobs.node_of(1)}: " in failure.reason


def test_preempted_job(strict_jobs):
    job = strict_jobs.submit(":", "--exclusive")
    strict_jobs.node_of(1)
    strict_jobs.lab.call("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap", "true")
    failure = strict_jobs.failure(job)
    assert failure == Failure("preemption", "preempted by a job of higher priority (PREEMPTED)", True, ())


def test_time_limit(jobs):
    """Slurm checks limits every 30 s from its start: at the end of this file the wait is shortest."""
    job = jobs.submit(":", "--time=5")
    jobs.node_of(1)
    jobs.lab.call("scontrol", "update", f"jobid={job}", "EndTime=now+1seconds")
    assert jobs.failure(job) == Failure("time_limit", "the job's time limit was reached (TIMEOUT)", False, ())
