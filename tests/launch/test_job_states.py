"""Job states parsed from stored output of squeue, sacct and jobcomp; and the polling backoff."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.launch.slurm.backoff import Backoff
from llmb.launch.slurm.job_states import job_phase, parse_completions, parse_sacct, parse_squeue

SQUEUE_OUTPUT = """\
5|PENDING|BeginTime|0||1794746703|1794750303|NONE|0|(null)|
6|FAILED|JobLaunchFailure|9|n1|1794746823|1794746823|1794746823|0|(null)|
4|FAILED|NonZeroExitCode|768|n1|1794746703|1794746703|1794746704|0|llmb:a b|c"d|
7|CANCELLED|None|15|n1|1794746823|1794746823|1794746824|0|first
second line|
8|RUNNING|None|0|n[1-2]|1794746849|1794746855|1826282855|1|one|
12|OUT_OF_MEMORY|OutOfMemory|125|n1|1794746849|1794746855|1794746860|0|(null)|
13|CANCELLED|Dependency|0||1794746849|1794746860|1794746860|0|(null)|
"""
SACCT_OUTPUT = """\
8|REQUEUED|None|0:0|n1|1794746847|1794746847|1794746848|one
8|CANCELLED by 0|None|0:0|n2|1794746849|1794746855|1794746860|
9|RUNNING|None|0:0|n1|1794746849|1794746855|Unknown|
4|FAILED|None|3:0|n1|1794746703|1794746703|1794746704|llmb:a b|c"d
13|CANCELLED by 0|None|0:0|None assigned|1794746849|None|1794746860|
4.batch|FAILED||3:0|n1|1794746703|1794746703|1794746704|
"""
COMPLETIONS = """\
JobId=6 UserId=root(0) GroupId=root(0) Name=a JobState=x JobState=FAILED Partition=main TimeLimit=UNLIMITED \
StartTime=2026-11-15T12:47:03 EndTime=2026-11-15T12:48:03 NodeList=n1 NodeCnt=1 ProcCnt=1 WorkDir=/w ReservationName= \
SubmitTime=2026-11-15T12:47:01 EligibleTime=2026-11-15T12:47:03 DerivedExitCode=0:0 ExitCode=0:9
JobId=66 UserId=root(0) JobState=COMPLETED NodeList=n1 ExitCode=0:0
a line of something else
""".splitlines()


def test_squeue_running_and_pending_jobs():
    jobs = parse_squeue(SQUEUE_OUTPUT)
    running = jobs["8"]
    assert (running.phase, running.state, running.nodes, running.restarts) == ("running", "RUNNING", "n[1-2]", 1)
    assert (running.submitted_at, running.started_at, running.comment) == (1794746849.0, 1794746855.0, "one")
    assert running.ended_at is None, "a time limit is not an end"
    assert running.exit_code is None
    pending = jobs["5"]
    assert (pending.phase, pending.reason, pending.nodes) == ("pending", "BeginTime", None)
    assert pending.started_at is None, "an expected start is not a start"


@pytest.mark.parametrize(
    ("job_id", "exit_code", "signal"),
    [("4", 3, None), ("6", None, 9), ("7", None, 15), ("12", None, 125), ("13", None, None)],
)
def test_exit_code_or_signal_of_an_ended_job(job_id, exit_code, signal):
    job = parse_squeue(SQUEUE_OUTPUT)[job_id]
    assert (job.phase, job.exit_code, job.signal) == ("ended", exit_code, signal)


def test_job_cancelled_while_pending_has_no_start():
    for job in (parse_squeue(SQUEUE_OUTPUT)["13"], parse_sacct(SACCT_OUTPUT)["13"]):
        assert (job.state, job.started_at, job.ended_at, job.nodes) == ("CANCELLED", None, 1794746860.0, None)


def test_comments_may_hold_separators_and_newlines():
    jobs = parse_squeue(SQUEUE_OUTPUT)
    assert jobs["4"].comment == parse_sacct(SACCT_OUTPUT)["4"].comment == 'llmb:a b|c"d'
    assert jobs["7"].comment == "first"
    assert jobs.keys() == {"4", "5", "6", "7", "8", "12", "13"}


def test_sacct_returns_the_last_run_of_a_requeued_job():
    job = parse_sacct(SACCT_OUTPUT)["8"]
    assert (job.state, job.nodes, job.restarts, job.exit_code) == ("CANCELLED", "n2", 1, None)


def test_sacct_ignores_jobs_that_run_for_ever():
    assert "9" not in parse_sacct(SACCT_OUTPUT)


def test_completion_file():
    jobs = parse_completions(COMPLETIONS, {"6"})
    assert jobs.keys() == {"6"}
    job = jobs["6"]
    assert (job.state, job.signal, job.nodes, job.folder) == ("FAILED", 9, "n1", "/w")
    assert job.ended_at == time.mktime((2026, 11, 15, 12, 48, 3, 0, 0, -1))
    assert job.submitted_at == job.started_at - 2


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("PENDING", "pending"),
        ("REQUEUE_HOLD", "pending"),
        ("CONFIGURING", "running"),
        ("COMPLETING", "running"),
        ("SUSPENDED", "running"),
        ("PREEMPTED", "ended"),
        ("DEADLINE", "ended"),
        ("A_FUTURE_STATE", "running"),
    ],
)
def test_phase_of_every_state(state, phase):
    assert job_phase(state) == phase


@given(st.text(alphabet="0123456789|:NULOa \n") | st.text())
def test_parsers_accept_any_text(text):
    for parse in (parse_squeue, parse_sacct, lambda text: parse_completions(text.splitlines(), {"1"})):
        for job_id, job in parse(text).items():
            assert job_id == job.job_id
            assert job.phase == "ended" or job.ended_at is None


def test_backoff_grows_while_nothing_changes():
    backoff = Backoff(shortest_s=1.0, longest_s=4.0)
    assert [backoff.next_delay_s("same") for _ in range(6)] == [1.0, 1.5, 2.25, 3.375, 4.0, 4.0]
    assert [backoff.next_delay_s("new"), backoff.next_delay_s("new"), backoff.next_delay_s("newer")] == [1.0, 1.5, 1.0]
