"""Runs under a launcher such as srun: stopping ranks, parsing its output, and the folder of a restart."""

import signal
import time

import pytest

from llmb.events import RunEnded, RunStarted
from llmb.launch.failure import diagnose
from llmb.launch.local import run_local
from llmb.launch.run_folder import RunFolder
from llmb.launch.slurm.slurm_jobs import JobState
from llmb.launch.slurm.srun import srun_launcher
from llmb.launch.verdict import Verdict, exit_codes, finished_run_verdict, stopped_run_verdict

# Fake srun: forwards SIGUSR1 to its ranks, and kills them on SIGTERM.
LAUNCHER = """
def forward(*_):
    write(RunEnded(time=time.time(), status="timeout", reason="interrupted by SIGUSR1"))
    sys.exit(138)
def kill_ranks(*_):
    open("killed", "w").close()
    os._exit(137)
signal.signal(signal.SIGUSR1, forward if {ranks_exit} else signal.SIG_IGN)
signal.signal(signal.SIGTERM, kill_ranks)
write(RunStarted(time=time.time(), world_size=2, pid=os.getpid()))
time.sleep(60)
"""


@pytest.fixture
def run_launcher(config, run_folder, engine):
    def run(ranks_exit: bool, on_event=lambda event: None, timeout_s: float = 1.0):
        source, launcher = (
            LAUNCHER.replace("{ranks_exit}", str(ranks_exit)),
            srun_launcher(run_folder.slurm_output("7"), "n1"),
        )
        return run_local(config, run_folder, engine(source), {}, on_event, timeout_s, grace_s=1.0, launcher=launcher)

    return run


def test_ranks_are_stopped_through_the_launcher(run_launcher, run_folder):
    outcome = run_launcher(ranks_exit=True)
    assert (outcome.status, outcome.reason) == ("timeout", "stopped after the time limit of 1 s")
    assert not (run_folder.path / "killed").exists()
    assert not run_folder.job_script.exists()  # written by the submitter


def test_launcher_kills_ranks_that_do_not_exit(run_launcher, run_folder):
    outcome = run_launcher(ranks_exit=False)
    assert outcome.status == "timeout"
    assert (run_folder.path / "killed").exists()


@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [
        (signal.SIGUSR1, "timeout", "stopped shortly before Slurm's time limit"),
        (signal.SIGTERM, "incomplete", "ended by Slurm with SIGTERM: cancelled, preempted, or a node was lost"),
        (signal.SIGINT, "incomplete", "interrupted by SIGINT"),
    ],
)
def test_verdict_for_a_signal_of_the_scheduler(run_launcher, number, status, reason):
    def on_event(event):
        if isinstance(event, RunStarted):
            signal.raise_signal(number)

    outcome = run_launcher(ranks_exit=True, on_event=on_event, timeout_s=20.0)
    assert (outcome.status, outcome.reason, outcome.interrupted) == (status, reason, number)


@pytest.mark.parametrize(
    ("due_to", "status", "cause"),
    [
        ("", "incomplete", "cancelled"),
        (" DUE TO PREEMPTION", "incomplete", "preemption"),
        (" DUE TO JOB REQUEUE", "incomplete", "job requeue"),
        (" DUE TO TIME LIMIT", "timeout", "time limit"),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "incomplete", "node failure"),
    ],
)
def test_cause_from_the_output_of_slurm(tmp_path, due_to, status, cause):
    output = tmp_path / "slurm-7.out"
    output.write_text(f"hello\nslurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-15T13:05:33{due_to} ***\n")
    assert srun_launcher(output, "n1").verdict(signal.SIGTERM) == Verdict(
        status, f"ended by Slurm with SIGTERM: {cause}"
    )


KILLED = """\
[rank1]: working
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=2.0
slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-15T12:39:30 ***
srun: error: n1: tasks 0-1: Exited with exit code 143
srun: error: n2: task 2: Terminated
"""


def test_exit_codes_exclude_tasks_killed_by_srun():
    assert exit_codes(KILLED) == {3: -signal.SIGKILL}
    assert exit_codes("srun: error: gpu-7: tasks 0,2-3: Exited with exit code 1\n") == {0: 1, 2: 1, 3: 1}
    assert exit_codes("srun: error: n1: task 4: Segmentation fault (core dumped)\n") == {4: -signal.SIGSEGV}
    assert exit_codes("srun: error: n1: task 0: Out Of Memory\n") == {0: -signal.SIGKILL}
    assert exit_codes("srun: error: Unable to create step for job 7: Job/step already completing\n") == {}


def test_killed_rank_that_srun_reports_after_its_peer():
    """Its node may be the slower one to report: the peer that lost the connection to it did not die first."""
    log = (
        "srun: error: n1: task 0: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=2.0\n"
        "srun: error: n2: task 1: Killed\n"
    )
    lost = RunEnded(rank=0, time=1.0, status="failed", reason="Connection reset by peer", failed_rank=0)
    killed = Verdict("failed", "rank 1: killed by signal 9 (SIGKILL)", 1)
    assert finished_run_verdict(1, [lost], log, silent=[1], launcher="srun on n1") == killed
    assert finished_run_verdict(1, [lost], log.replace("Killed", "Out Of Memory"), silent=[1]).status == "oom"
    # srun's own SIGTERM says nothing about the cause, nor does its SIGKILL to a rank whose peer failed by itself.
    terminated = finished_run_verdict(1, [lost], log.replace("Killed", "Terminated"), silent=[1])
    assert "disappeared without an exit status" in (terminated.reason or "")
    raised = RunEnded(rank=0, time=1.0, status="failed", reason="ValueError: bad", failed_rank=0)
    assert finished_run_verdict(1, [raised], log, silent=[1]) == Verdict("failed", "ValueError: bad", 0)


def test_rank_killed_according_to_srun_is_the_failed_rank():
    ends = [RunEnded(time=1.0, rank=rank, status="incomplete", reason="interrupted by SIGTERM") for rank in (0, 1, 2)]
    assert finished_run_verdict(137, ends, KILLED) == Verdict("failed", "rank 3: killed by signal 9 (SIGKILL)", 3)


def test_lost_connection_while_stopping_is_not_the_cause():
    stop = Verdict("incomplete", "cancelled")
    lost = RunEnded(time=time.time(), rank=1, status="failed", reason="RuntimeError: Connection closed by peer")
    assert stopped_run_verdict(stop, [lost], 1, None) == stop


def test_each_restart_gets_its_own_folder(run_folder):
    assert run_folder.for_new_start() == run_folder
    run_folder.allocation.write_text("{}")
    run_folder.events(0).write_text("first\n")
    restarted = RunFolder.open(run_folder.path).for_new_start()
    assert restarted.work == run_folder.path / "restart-1"
    assert (restarted.work / "config.json").read_text() == run_folder.config.read_text()
    assert restarted.all_events() == []
    restarted.allocation.write_text("{}")
    assert RunFolder.open(run_folder.path) == restarted
    assert [run.restart for run in RunFolder.find_all(run_folder.install)] == [1]
    assert restarted.for_new_start().work.name == "restart-2"
    assert (restarted.name, restarted.config, restarted.created_at) == (
        run_folder.name,
        run_folder.config,
        run_folder.created_at,
    )


def test_killed_launcher_is_the_culprit_not_a_rank_that_lost_it(run_folder, config, engine):
    source = """
write(RunStarted(time=time.time(), world_size=2, pid=os.getpid()))
write(RunEnded(time=time.time(), status="failed", reason="Connection closed by peer"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    launcher = srun_launcher(run_folder.slurm_output("7"), "n1")
    outcome = run_local(config, run_folder, engine(source), {}, lambda event: None, 60.0, launcher=launcher)
    assert (outcome.status, outcome.failed_rank) == ("failed", None)
    assert outcome.reason == "srun on n1 was killed by signal 9 (SIGKILL); its ranks ended with it"
    ranks = [RunStarted(time=1.0, rank=rank, host=host) for rank, host in enumerate(("n1", "n1", "n2", "n2"))]
    ends = [RunEnded(rank=rank, status="failed", reason="Connection closed by peer") for rank in (0, 1)]
    job = JobState(job_id="7", phase="ended", state="FAILED", exit_code=2, nodes="n[1-2]")
    failure = diagnose(Verdict(outcome.status, outcome.reason), job, "", [*ranks, *ends])
    assert failure is not None
    assert failure.kind == "killed"
    assert "killed for an unknown reason on n1: srun on n1 was killed" in failure.reason


def test_launcher_killed_for_memory_is_oom_on_its_host():
    verdict = finished_run_verdict(-9, [], "", oom_kills=1, launcher="srun on n1", memory="cgroup job: peak 2 GiB")
    assert (verdict.status, verdict.failed_rank) == ("oom", None)
    assert (verdict.reason or "").startswith("srun on n1 killed by the kernel's OOM killer")
    assert (verdict.reason or "").endswith("(cgroup job: peak 2 GiB)")
    failure = diagnose(verdict, JobState(job_id="7", phase="ended", state="FAILED", nodes="n[1-2]"))
    assert failure is not None
    assert (failure.kind, " on n1: " in failure.reason) == ("oom_kill", True)
    # What the kernel did on this host says nothing about a rank that was killed on another.
    log = "srun: error: n2: task 3: Killed\n"
    assert finished_run_verdict(1, [], log, oom_kills=1, launcher="srun on n1").status == "failed"
