"""Runs whose ranks a launcher such as srun holds: how they are stopped, what its words mean, where a restart works."""

import signal
import time

import pytest

from llmb.events import RunEnded, RunStarted
from llmb.launch.local import run_local
from llmb.launch.run_folder import RunDir
from llmb.launch.slurm.srun import srun
from llmb.launch.verdict import Verdict, exit_codes, finished, stopped

# Stands in for srun: it passes SIGUSR1 on to its ranks, and would kill them on SIGTERM.
LAUNCHER = """
def passed_on(*_):
    write(RunEnded(time=time.time(), status="timeout", reason="interrupted by SIGUSR1"))
    sys.exit(138)
def kills(*_):
    open("killed", "w").close()
    os._exit(137)
signal.signal(signal.SIGUSR1, passed_on if {gentle} else signal.SIG_IGN)
signal.signal(signal.SIGTERM, kills)
write(RunStarted(time=time.time(), world_size=2, pid=os.getpid()))
time.sleep(60)
"""


@pytest.fixture
def launched(config, rundir, engine):
    def run(gentle: bool, on_event=lambda event: None, timeout_s: float = 1.0):
        source, launcher = LAUNCHER.replace("{gentle}", str(gentle)), srun(rundir.slurm_output("7"))
        return run_local(config, rundir, engine(source), {}, on_event, timeout_s, grace_s=1.0, launcher=launcher)

    return run


def test_ranks_are_asked_to_end_through_the_launcher(launched, rundir):
    outcome = launched(gentle=True)
    assert (outcome.status, outcome.reason) == ("timeout", "stopped after the time limit of 1 s")
    assert not (rundir.path / "killed").exists()
    assert not rundir.job_script.exists()  # that is Slurm's


def test_a_launcher_whose_ranks_do_not_end_kills_them(launched, rundir):
    outcome = launched(gentle=False)
    assert outcome.status == "timeout"
    assert (rundir.path / "killed").exists()


@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [
        (signal.SIGUSR1, "timeout", "stopped shortly before Slurm's time limit"),
        (signal.SIGTERM, "incomplete", "ended by Slurm with SIGTERM: cancelled, preempted, or a node was lost"),
        (signal.SIGINT, "incomplete", "interrupted by SIGINT"),
    ],
)
def test_a_schedulers_signal_has_a_meaning(launched, number, status, reason):
    def on_event(event):
        if isinstance(event, RunStarted):
            signal.raise_signal(number)

    outcome = launched(gentle=True, on_event=on_event, timeout_s=20.0)
    assert (outcome.status, outcome.reason, outcome.interrupted) == (status, reason, number)


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        ("", "incomplete", "cancelled"),
        (" DUE TO PREEMPTION", "incomplete", "preemption"),
        (" DUE TO JOB REQUEUE", "incomplete", "job requeue"),
        (" DUE TO TIME LIMIT", "timeout", "time limit"),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "incomplete", "node failure"),
    ],
)
def test_slurm_says_why_it_ends_a_job(tmp_path, words, status, why):
    output = tmp_path / "slurm-7.out"
    output.write_text(f"hello\nslurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-15T13:05:33{words} ***\n")
    assert srun(output).meaning(signal.SIGTERM) == Verdict(status, f"ended by Slurm with SIGTERM: {why}")


KILLED = """\
[rank1]: working
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=2.0
slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-15T12:39:30 ***
srun: error: n1: tasks 0-1: Exited with exit code 143
srun: error: n2: task 2: Terminated
"""


def test_sruns_words_name_the_first_to_fail_and_none_that_it_ended_itself():
    assert exit_codes(KILLED) == {3: -signal.SIGKILL}
    assert exit_codes("srun: error: gpu-7: tasks 0,2-3: Exited with exit code 1\n") == {0: 1, 2: 1, 3: 1}
    assert exit_codes("srun: error: n1: task 4: Segmentation fault (core dumped)\n") == {4: -signal.SIGSEGV}
    assert exit_codes("srun: error: n1: task 0: Out Of Memory\n") == {0: -signal.SIGKILL}
    assert exit_codes("srun: error: Unable to create step for job 7: Job/step already completing\n") == {}


def test_a_rank_that_srun_saw_killed_is_guilty():
    ends = [RunEnded(time=1.0, rank=rank, status="incomplete", reason="interrupted by SIGTERM") for rank in (0, 1, 2)]
    assert finished(137, ends, KILLED) == Verdict("failed", "rank 3: killed by signal 9 (SIGKILL)", 3)


def test_ranks_that_lose_one_another_while_the_run_is_stopped_are_not_its_end():
    stop = Verdict("incomplete", "cancelled")
    lost = RunEnded(time=time.time(), rank=1, status="failed", reason="RuntimeError: Connection closed by peer")
    assert stopped(stop, [lost], 1, None) == stop


def test_each_start_but_the_first_works_in_a_folder_of_its_own(rundir):
    assert rundir.for_new_start() == rundir
    rundir.allocation.write_text("{}")
    rundir.events(0).write_text("first\n")
    again = RunDir.open(rundir.path).for_new_start()
    assert again.work == rundir.path / "restart-1"
    assert (again.work / "config.json").read_text() == rundir.config.read_text()
    assert again.all_events() == []
    again.allocation.write_text("{}")
    assert RunDir.open(rundir.path) == again
    assert [found.restart for found in RunDir.find_all(rundir.install)] == [1]
    assert again.for_new_start().work.name == "restart-2"
    assert (again.name, again.config, again.created_at) == (rundir.name, rundir.config, rundir.created_at)
