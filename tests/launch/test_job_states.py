"""Jobs as Slurm's programs print them, read from kept texts; and how long to wait between two questions."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.launch.slurm.backoff import Backoff
from llmb.launch.slurm.job_states import phase_of, read_completions, read_sacct, read_squeue

SQUEUE = """\
5|PENDING|BeginTime|0||1794746703|1794750303|NONE|0|(null)|
6|FAILED|JobLaunchFailure|9|n1|1794746823|1794746823|1794746823|0|(null)|
4|FAILED|NonZeroExitCode|768|n1|1794746703|1794746703|1794746704|0|llmb:a b|c"d|
7|CANCELLED|None|15|n1|1794746823|1794746823|1794746824|0|first
second line|
8|RUNNING|None|0|n[1-2]|1794746849|1794746855|1826282855|1|one|
12|OUT_OF_MEMORY|OutOfMemory|125|n1|1794746849|1794746855|1794746860|0|(null)|
13|CANCELLED|Dependency|0||1794746849|1794746860|1794746860|0|(null)|
"""
SACCT = """\
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


def test_squeue_tells_all_of_a_job_at_once():
    jobs = read_squeue(SQUEUE)
    running = jobs["8"]
    assert (running.phase, running.state, running.nodes, running.restarts) == ("running", "RUNNING", "n[1-2]", 1)
    assert (running.submitted_at, running.started_at, running.comment) == (1794746849.0, 1794746855.0, "one")
    assert running.ended_at is None, "its time limit is no end"
    assert running.exit_code is None
    waiting = jobs["5"]
    assert (waiting.phase, waiting.reason, waiting.nodes) == ("pending", "BeginTime", None)
    assert waiting.started_at is None, "an expected start is none"


@pytest.mark.parametrize(
    ("job_id", "exit_code", "signal"),
    [("4", 3, None), ("6", None, 9), ("7", None, 15), ("12", None, 125), ("13", None, None)],
)
def test_an_ended_job_has_an_exit_code_or_a_signal_or_neither(job_id, exit_code, signal):
    job = read_squeue(SQUEUE)[job_id]
    assert (job.phase, job.exit_code, job.signal) == ("ended", exit_code, signal)


def test_a_job_cancelled_in_the_queue_never_started():
    for job in (read_squeue(SQUEUE)["13"], read_sacct(SACCT)["13"]):
        assert (job.state, job.started_at, job.ended_at, job.nodes) == ("CANCELLED", None, 1794746860.0, None)


def test_comments_may_hold_separators_and_newlines():
    jobs = read_squeue(SQUEUE)
    assert jobs["4"].comment == read_sacct(SACCT)["4"].comment == 'llmb:a b|c"d'
    assert jobs["7"].comment == "first"
    assert jobs.keys() == {"4", "5", "6", "7", "8", "12", "13"}


def test_accounts_tell_the_last_run_of_a_requeued_job():
    job = read_sacct(SACCT)["8"]
    assert (job.state, job.nodes, job.restarts, job.exit_code) == ("CANCELLED", "n2", 1, None)


def test_accounts_are_not_believed_about_jobs_that_run_for_ever():
    assert "9" not in read_sacct(SACCT)


def test_the_completion_file_knows_ends_and_local_times():
    jobs = read_completions(COMPLETIONS, {"6"})
    assert jobs.keys() == {"6"}
    job = jobs["6"]
    assert (job.state, job.signal, job.nodes, job.folder) == ("FAILED", 9, "n1", "/w")
    assert job.ended_at == time.mktime((2026, 11, 15, 12, 48, 3, 0, 0, -1))
    assert job.submitted_at == job.started_at - 2


@pytest.mark.parametrize(
    ("word", "phase"),
    [
        ("PENDING", "pending"),
        ("REQUEUE_HOLD", "pending"),
        ("CONFIGURING", "running"),
        ("COMPLETING", "running"),
        ("SUSPENDED", "running"),
        ("PREEMPTED", "ended"),
        ("DEADLINE", "ended"),
        ("A_WORD_OF_TOMORROW", "running"),
    ],
)
def test_every_word_has_a_phase(word, phase):
    assert phase_of(word) == phase


@given(st.text(alphabet="0123456789|:NULOa \n") | st.text())
def test_nothing_that_is_printed_makes_a_reader_stumble(text):
    for read in (read_squeue, read_sacct, lambda text: read_completions(text.splitlines(), {"1"})):
        for job_id, job in read(text).items():
            assert job_id == job.job_id
            assert job.phase == "ended" or job.ended_at is None


def test_questions_grow_rare_while_nothing_changes():
    backoff = Backoff(shortest_s=1.0, longest_s=4.0)
    assert [backoff.after("same") for _ in range(6)] == [1.0, 1.5, 2.25, 3.375, 4.0, 4.0]
    assert [backoff.after("new"), backoff.after("new"), backoff.after("newer")] == [1.0, 1.5, 1.0]
