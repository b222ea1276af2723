"""Runs of real child processes: each way to end has its name, and nothing is left behind."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmb import events
from llmb.errors import LaunchError
from llmb.events import LogProblem, RunEnded, RunStarted, StepDone
from llmb.launch.local import run_local
from llmb.launch.procfs import find
from llmb.launch.run_folder import is_alive, live_pid


def left_alive(rundir) -> list[int]:
    return [pid for pid in map(int, (rundir.path / "pids").read_text().split()) if find(pid) is not None]


def test_events_are_streamed_in_order_while_the_engine_runs(config, rundir, engine):
    command = engine("""
        write(RunStarted(time=time.time()))
        for step in (1, 2, 3):
            write(StepDone(step=step, seconds=0.5))
            print("step", step)
            while not Path(f"seen{step}").exists():  # goes on only when the step has been delivered
                time.sleep(0.01)
        write(RunEnded(status="ok"))
    """)
    seen = []

    def on_event(event):
        seen.append(event)
        if isinstance(event, StepDone):
            (rundir.path / f"seen{event.step}").touch()

    outcome = run_local(config, rundir, command, {}, on_event, timeout_s=20)
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("ok", None, 0)
    assert 0 < outcome.seconds < 20
    assert [type(event) for event in seen] == [RunStarted, StepDone, StepDone, StepDone, RunEnded]
    assert [event.step for event in seen if isinstance(event, StepDone)] == [1, 2, 3]
    assert list(events.read(rundir.events(0))) == seen
    assert rundir.log.read_text() == "step 1\nstep 2\nstep 3\n"


def test_the_engine_works_in_its_run_folder_with_the_wanted_environment(launch):
    ran = launch(
        """
        print(os.getcwd(), os.environ["WANTED"], os.environ["PYTHONUNBUFFERED"], os.environ["OMP_NUM_THREADS"])
        assert Path("config.json").exists() and sys.stdin.read() == ""
        write(RunEnded(status="ok"))
        """,
        environment={"WANTED": "a b"},
    )
    assert ran.outcome.status == "ok"
    folder, *values = ran.log.rsplit(maxsplit=4)
    assert Path(folder) == ran.rundir.path
    assert values[:3] == ["a", "b", "1"]
    assert int(values[3]) >= 1


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        ("print('first'); print('cannot open data'); sys.exit(3)", "failed", "exit code 3: cannot open data"),
        ("sys.exit(3)", "failed", "exit code 3"),
        ("raise ValueError('no such layer')", "failed", "exit code 1: ValueError: no such layer"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed", "killed by signal 9 (SIGKILL)"),
        ("os.abort()", "failed", "killed by signal 6 (SIGABRT)"),
        ("pass", "failed", "exit code 0, but the engine did not say how it ended"),
        ("print('CUDA out of memory. Tried 2 GiB'); sys.exit(1)", "oom", "CUDA out of memory. Tried 2 GiB"),
        ("print('x.OutOfMemoryError'); os.kill(os.getpid(), 9)", "oom", "x.OutOfMemoryError"),
        ("write(RunEnded(status='oom', reason='peak 3 GiB')); sys.exit(2)", "oom", "peak 3 GiB"),
        ("write(RunEnded(status='diverged', reason='nan')); sys.exit(0)", "diverged", "nan"),
        ("write(RunEnded(status='ok')); sys.exit(3)", "failed", "exit code 3 after the engine had reported ok"),
    ],
)
def test_each_death_has_a_name_and_is_recorded(launch, source, status, reason):
    ran = launch(f"write(StepDone(step=1))\n{source}")
    assert (ran.outcome.status, ran.outcome.reason) == (status, reason)
    assert isinstance(ran.stored[0], StepDone)
    last = ran.stored[-1]
    assert isinstance(last, RunEnded)
    assert (last.status, last.reason) == (status, reason)
    assert ran.streamed == ran.stored


def test_the_rank_that_failed_first_is_the_cause(launch):
    ran = launch("""
        write(RunEnded(time=2.0, status="failed", reason="connection closed by peer"))
        write(RunEnded(time=1.0, rank=1, status="oom", reason="peak 80 GiB"), rank=1)
        write(RunEnded(time=3.0, rank=2, status="incomplete", reason="interrupted by SIGTERM"), rank=2)
        sys.exit(1)
    """)
    assert (ran.outcome.status, ran.outcome.reason) == ("oom", "rank 1: peak 80 GiB")
    assert ran.stored[-1].reason == "rank 1: peak 80 GiB"


def test_timeout_stays_a_timeout_when_the_engine_records_an_interruption(launch):
    ran = launch("end_on_sigterm()\nwrite(StepDone(step=1))\ntime.sleep(60)", timeout_s=0.7)
    assert (ran.outcome.status, ran.outcome.reason) == ("timeout", "stopped after the time limit of 0.7 s")
    assert ran.outcome.exit_code == 143
    assert [event.status for event in ran.stored if isinstance(event, RunEnded)] == ["incomplete", "timeout"]
    assert ran.outcome.seconds < 5


def test_a_run_that_ends_well_while_being_stopped_has_ended_well(launch):
    ran = launch(
        """
        signal.signal(signal.SIGTERM, lambda *_: Path("told").touch())
        while not Path("told").exists(): time.sleep(0.01)
        write(RunEnded(status="ok"))
        """,
        timeout_s=0.7,
    )
    assert (ran.outcome.status, ran.outcome.exit_code) == ("ok", 0)


def test_a_failure_before_the_time_limit_says_more_than_the_limit(launch):
    ran = launch("write(RunEnded(status='diverged', reason='loss is nan'))\ntime.sleep(60)", timeout_s=3)
    assert (ran.outcome.status, ran.outcome.reason) == ("diverged", "loss is nan")


def test_no_process_survives_a_timeout_not_even_deaf_ones_in_other_sessions(launch):
    ran = launch(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note_pid()
        if os.fork() == 0:                       # a child in the same group
            note_pid()
            if os.fork() == 0:                   # a grandchild that hides in a session of its own
                os.setsid()
                if os.fork() == 0:               # and its orphan
                    note_pid()
                    while True: time.sleep(60)
                os._exit(0)
        write(StepDone(step=1))
        while True: time.sleep(60)
        """,
        timeout_s=0.8,
        grace_s=0.5,
    )
    assert ran.outcome.status == "timeout"
    assert ran.outcome.exit_code == -9
    assert len((ran.rundir.path / "pids").read_text().split()) == 3
    assert left_alive(ran.rundir) == []
    assert ran.outcome.seconds < 5


def test_what_a_finished_engine_leaves_running_is_ended(launch):
    ran = launch(
        """
        if os.fork() == 0:
            os.setsid()
            note_pid()
            time.sleep(60)
        while not Path("pids").exists(): time.sleep(0.01)
        write(RunEnded(status="ok"))
        """
    )
    assert ran.outcome.status == "ok"
    assert left_alive(ran.rundir) == []
    assert ran.outcome.seconds < 4


def test_torn_lines_wait_for_their_other_half_or_are_passed_over(launch):
    ran = launch("""
        def put(text):
            with open("events.rank0.jsonl", "a") as file:
                file.write(text)
        put('{"event":"StepDone","st')
        time.sleep(0.3)
        put('ep":1}\\nnot an event\\n{"event":"StepDone","step":2}\\n{"event":"StepDone","ste')
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert [e.step for e in ran.streamed if isinstance(e, StepDone)] == [1, 2]
    assert ran.streamed[-1].reason == "killed by signal 9 (SIGKILL)"
    assert ran.stored == [*ran.streamed, LogProblem(problem="unreadable event line", count=2)]


def test_a_run_is_alive_only_while_it_runs(config, rundir, engine):
    assert is_alive(rundir) is False
    alive = []
    command = engine("write(StepDone(step=1))\ntime.sleep(0.2)\nwrite(RunEnded(status='ok'))")
    run_local(config, rundir, command, {}, lambda event: alive.append((is_alive(rundir), live_pid(rundir))), 20)
    assert alive[0][0] is True
    assert alive[0][1] != os.getpid()
    assert is_alive(rundir) is False
    assert live_pid(rundir) is None


def test_an_error_in_the_callback_ends_the_engine(config, rundir, engine):
    def on_event(event):
        raise RuntimeError("the terminal is gone")

    command = engine("end_on_sigterm()\nnote_pid()\nwrite(StepDone(step=1))\ntime.sleep(60)")
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        run_local(config, rundir, command, {}, on_event, 20)
    assert left_alive(rundir) == []
    assert list(events.read(rundir.events(0)))[-1].status == "incomplete"


def test_a_command_that_does_not_exist_is_a_launch_error(config, rundir):
    with pytest.raises(LaunchError, match="cannot start /no/such/python: No such file"):
        run_local(config, rundir, ["/no/such/python"], {}, lambda event: None, 20)
    assert list(events.read(rundir.events(0)))[-1].status == "failed"


def test_a_full_disk_stops_the_run_and_leaves_the_folder_readable(config, rundir, engine):
    rundir.log.symlink_to("/dev/full")
    command = engine("end_on_sigterm()\nnote_pid()\nwrite(StepDone(step=1))\nprint('hello')\ntime.sleep(60)")
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"log-.*\.out: No space left on device") as raised:
        run_local(config, rundir, command, {}, lambda event: None, 20)
    assert raised.value.exit_code == 2
    assert time.monotonic() - began < 10
    assert left_alive(rundir) == []
    assert rundir.read_config() == config
    step, *_, end = events.read(rundir.events(0))
    assert isinstance(step, StepDone)
    assert end.status == "failed"
    assert "No space left" in end.reason


def test_an_unwritable_log_is_a_launch_error(config, rundir, engine):
    rundir.log.mkdir()
    with pytest.raises(LaunchError, match=r"cannot write .*log-.*: Is a directory"):
        run_local(config, rundir, engine("note_pid()"), {}, lambda event: None, 20)
    assert not (rundir.path / "pids").exists()


def test_much_output_and_odd_bytes_do_not_block_the_engine(launch):
    ran = launch(r"""
        line = b"x" * 99 + b"\n"
        for _ in range(100):
            os.write(1, line * 500)
        os.write(2, b"progress 1\rprogress 2\r\xff\xfe no newline at the end")
        write(RunEnded(status="ok"))
    """)
    assert ran.outcome.status == "ok"
    log = ran.rundir.log.read_bytes()
    assert len(log) == 100 * 500 * 100 + len(b"progress 1\rprogress 2\r\xff\xfe no newline at the end")
    assert log.endswith(b"\xff\xfe no newline at the end")


def test_secrets_reach_the_engine_but_no_file(config, rundir, engine, monkeypatch):
    token, key, password = "hf_" + "A1b2C3d4" * 4, "k'e\"y\\with odd \n signs", "hunter2"
    monkeypatch.setenv("HF_TOKEN", token)
    wanted = {"SOME_API_KEY": key, "DB_PASSWORD": password, "PLAIN": "seen", "INNOCENT": f"x={token}"}
    command = engine("""
        print(os.environ["HF_TOKEN"], os.environ["SOME_API_KEY"], os.environ["INNOCENT"], os.environ["PLAIN"])
        print(dict(os.environ))
        print("password:", os.environ["DB_PASSWORD"], file=sys.stderr)
        assert len(os.environ["HF_TOKEN"]) == 35
        print("failed with", os.environ["HF_TOKEN"])
        sys.exit(1)
    """)
    outcome = run_local(replace(config, environment=wanted), rundir, command, wanted, lambda event: None, 20)
    assert outcome.reason == "exit code 1: failed with ***"
    assert "seen" in rundir.log.read_text()
    for path in rundir.path.iterdir():
        text = path.read_text()
        for secret in (token, "with odd", password):
            assert secret not in text, path.name


def test_off_the_main_thread_a_run_works_too(launch):
    ran = []
    thread = threading.Thread(target=lambda: ran.append(launch("write(RunEnded(status='ok'))")))
    thread.start()
    thread.join()
    assert ran[0].outcome.status == "ok"
