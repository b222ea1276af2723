"""Runs of real child processes: each exit has a status, and no process is left behind."""

import os
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmb import events
from llmb.errors import LaunchError
from llmb.events import LogProblem, RunEnded, RunStarted, StepDone
from llmb.launch.local import run_local
from llmb.launch.procfs import find_process
from llmb.launch.run_files.pid_file import is_alive, live_pid


def live_pids(run_folder) -> list[int]:
    return [pid for pid in map(int, (run_folder.path / "pids").read_text().split()) if find_process(pid) is not None]


def test_events_are_delivered_while_the_engine_runs(config, run_folder, engine):
    command = engine("""
        write(RunStarted(time=time.time()))
        for step in (1, 2, 3):
            write(StepDone(step=step, seconds=0.5))
            print("step", step)
            while not Path(f"seen{step}").exists():  # continues only when the step has been delivered
                time.sleep(0.01)
        write(RunEnded(status="ok"))
    """)
    delivered = []

    def on_event(event):
        delivered.append(event)
        if isinstance(event, StepDone):
            (run_folder.path / f"seen{event.step}").touch()

    outcome = run_local(config, run_folder, command, {}, on_event, timeout_s=20)
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("ok", None, 0)
    assert 0 < outcome.seconds < 20
    assert [type(event) for event in delivered] == [RunStarted, StepDone, StepDone, StepDone, RunEnded]
    assert [event.step for event in delivered if isinstance(event, StepDone)] == [1, 2, 3]
    assert list(events.read(run_folder.events(0))) == delivered
    assert run_folder.log.read_text() == "step 1\nstep 2\nstep 3\n"


def test_engine_runs_in_its_run_folder_with_the_environment(launch):
    run = launch(
        """
        print(os.getcwd(), os.environ["EXTRA"], os.environ["PYTHONUNBUFFERED"], os.environ["OMP_NUM_THREADS"])
        assert Path("config.json").exists() and sys.stdin.read() == ""
        write(RunEnded(status="ok"))
        """,
        environment={"EXTRA": "a b"},
    )
    assert run.outcome.status == "ok"
    folder, *values = run.log.rsplit(maxsplit=4)
    assert Path(folder) == run.run_folder.path
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
        ("pass", "failed", "exit code 0, but the engine recorded no end"),
        ("print('CUDA out of memory. Tried 2 GiB'); sys.exit(1)", "oom", "CUDA out of memory. Tried 2 GiB"),
        ("print('x.OutOfMemoryError'); os.kill(os.getpid(), 9)", "oom", "x.OutOfMemoryError"),
        ("write(RunEnded(status='oom', reason='peak 3 GiB')); sys.exit(2)", "oom", "peak 3 GiB"),
        ("write(RunEnded(status='diverged', reason='nan')); sys.exit(0)", "diverged", "nan"),
        ("write(RunEnded(status='ok')); sys.exit(3)", "failed", "exit code 3 after the engine had reported ok"),
    ],
)
def test_each_exit_has_a_status_and_is_recorded(launch, source, status, reason):
    run = launch(f"write(StepDone(step=1))\n{source}")
    assert (run.outcome.status, run.outcome.reason) == (status, reason)
    assert isinstance(run.stored[0], StepDone)
    last = run.stored[-1]
    assert isinstance(last, RunEnded)
    assert (last.status, last.reason) == (status, reason)
    assert run.streamed == run.stored


def test_rank_that_failed_first_is_the_cause(launch):
    run = launch("""
        write(RunEnded(time=2.0, status="failed", reason="connection closed by peer"))
        write(RunEnded(time=1.0, rank=1, status="oom", reason="peak 80 GiB"), rank=1)
        write(RunEnded(time=3.0, rank=2, status="incomplete", reason="interrupted by SIGTERM"), rank=2)
        sys.exit(1)
    """)
    assert (run.outcome.status, run.outcome.reason) == ("oom", "rank 1: peak 80 GiB")
    assert run.stored[-1].reason == "rank 1: peak 80 GiB"


def test_timeout_outweighs_the_interruption_recorded_by_the_engine(launch):
    run = launch("exit_on_sigterm()\nwrite(StepDone(step=1))\ntime.sleep(60)", timeout_s=0.7)
    assert (run.outcome.status, run.outcome.reason) == ("timeout", "stopped after the time limit of 0.7 s")
    assert run.outcome.exit_code == 143
    assert [event.status for event in run.stored if isinstance(event, RunEnded)] == ["incomplete", "timeout"]
    assert run.outcome.seconds < 30


def test_run_that_completes_while_being_stopped_is_ok(launch):
    run = launch(
        """
        signal.signal(signal.SIGTERM, lambda *_: Path("signaled").touch())
        while not Path("signaled").exists(): time.sleep(0.01)
        write(RunEnded(status="ok"))
        """,
        timeout_s=0.7,
    )
    assert (run.outcome.status, run.outcome.exit_code) == ("ok", 0)


def test_failure_before_the_time_limit_outweighs_the_timeout(launch):
    run = launch("write(RunEnded(status='diverged', reason='loss is nan'))\ntime.sleep(60)", timeout_s=3)
    assert (run.outcome.status, run.outcome.reason) == ("diverged", "loss is nan")


def test_no_process_survives_a_timeout_even_in_other_sessions(launch):
    run = launch(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        record_pid()
        if os.fork() == 0:                       # a child in the same group
            record_pid()
            if os.fork() == 0:                   # a grandchild in a session of its own
                os.setsid()
                if os.fork() == 0:               # and its orphan
                    record_pid()
                    while True: time.sleep(60)
                os._exit(0)
        write(StepDone(step=1))
        while True: time.sleep(60)
        """,
        timeout_s=0.8,
        grace_s=0.5,
    )
    assert run.outcome.status == "timeout"
    assert run.outcome.exit_code == -9
    assert len((run.run_folder.path / "pids").read_text().split()) == 3
    assert live_pids(run.run_folder) == []
    assert run.outcome.seconds < 30


def test_orphans_of_a_finished_engine_are_stopped(launch):
    run = launch(
        """
        if os.fork() == 0:
            os.setsid()
            record_pid()
            time.sleep(60)
        while not Path("pids").exists(): time.sleep(0.01)
        write(RunEnded(status="ok"))
        """
    )
    assert run.outcome.status == "ok"
    assert live_pids(run.run_folder) == []
    assert run.outcome.seconds < 30


def test_partial_event_lines_are_completed_or_skipped(launch):
    run = launch("""
        def put(text):
            with open("events.rank0.jsonl", "a") as file:
                file.write(text)
        put('{"event":"StepDone","st')
        time.sleep(0.3)
        put('ep":1}\\nnot an event\\n{"event":"StepDone","step":2}\\n{"event":"StepDone","ste')
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert [e.step for e in run.streamed if isinstance(e, StepDone)] == [1, 2]
    assert run.streamed[-1].reason == "killed by signal 9 (SIGKILL)"
    assert run.stored == [*run.streamed, LogProblem(problem="unreadable event line", count=2)]


def test_is_alive_only_while_the_run_runs(config, run_folder, engine):
    assert is_alive(run_folder) is False
    alive = []
    command = engine("write(StepDone(step=1))\ntime.sleep(0.2)\nwrite(RunEnded(status='ok'))")
    run_local(
        config, run_folder, command, {}, lambda event: alive.append((is_alive(run_folder), live_pid(run_folder))), 20
    )
    assert alive[0][0] is True
    assert alive[0][1] != os.getpid()
    assert is_alive(run_folder) is False
    assert live_pid(run_folder) is None


def test_exception_in_the_callback_stops_the_engine(config, run_folder, engine):
    def on_event(event):
        raise RuntimeError("the terminal is gone")

    command = engine("exit_on_sigterm()\nrecord_pid()\nwrite(StepDone(step=1))\ntime.sleep(60)")
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        run_local(config, run_folder, command, {}, on_event, 20)
    assert live_pids(run_folder) == []
    assert list(events.read(run_folder.events(0)))[-1].status == "incomplete"


def test_missing_command_is_a_launch_error(config, run_folder):
    with pytest.raises(LaunchError, match="cannot start /no/such/python: No such file"):
        run_local(config, run_folder, ["/no/such/python"], {}, lambda event: None, 20)
    assert list(events.read(run_folder.events(0)))[-1].status == "failed"


def test_full_disk_stops_the_run_and_leaves_the_folder_readable(config, run_folder, engine):
    source = "exit_on_sigterm()\nrecord_pid()\nwrite(StepDone(step=1))\nprint('hello ' * 20_000)\ntime.sleep(60)"
    command = engine(source)
    start = time.monotonic()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # the log is the only file that grows so far
    try:
        with pytest.raises(LaunchError, match=r"log-.*\.out: File too large") as raised:
            run_local(config, run_folder, command, {}, lambda event: None, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.exit_code == 2
    assert time.monotonic() - start < 10
    assert live_pids(run_folder) == []
    assert run_folder.read_config() == config
    step, *_, end = events.read(run_folder.events(0))
    assert isinstance(step, StepDone)
    assert end.status == "failed"
    assert "File too large" in end.reason


def test_unwritable_log_is_a_launch_error(config, run_folder, engine):
    run_folder.log.mkdir()
    with pytest.raises(LaunchError, match=r"cannot write .*log-.*: Is a directory"):
        run_local(config, run_folder, engine("record_pid()"), {}, lambda event: None, 20)
    assert not (run_folder.path / "pids").exists()


def test_large_output_and_invalid_utf8_do_not_block_the_engine(launch):
    run = launch(r"""
        line = b"x" * 99 + b"\n"
        for _ in range(100):
            os.write(1, line * 500)
        os.write(2, b"progress 1\rprogress 2\r\xff\xfe no newline at the end")
        write(RunEnded(status="ok"))
    """)
    assert run.outcome.status == "ok"
    log = run.run_folder.log.read_bytes()
    assert len(log) == 100 * 500 * 100 + len(b"progress 1\rprogress 2\r\xff\xfe no newline at the end")
    assert log.endswith(b"\xff\xfe no newline at the end")


def test_secrets_reach_the_engine_but_no_file(config, run_folder, engine, monkeypatch):
    token, key, password = "hf_" + "A1b2C3d4" * 4, "k'e\"y\\with odd \n signs", "hunter2"
    monkeypatch.setenv("HF_TOKEN", token)
    environment = {"SOME_API_KEY": key, "DB_PASSWORD": password, "PLAIN": "seen", "INNOCENT": f"x={token}"}
    command = engine("""
        print(os.environ["HF_TOKEN"], os.environ["SOME_API_KEY"], os.environ["INNOCENT"], os.environ["PLAIN"])
        print(dict(os.environ))
        print("password:", os.environ["DB_PASSWORD"], file=sys.stderr)
        assert len(os.environ["HF_TOKEN"]) == 35
        print("failed with", os.environ["HF_TOKEN"])
        sys.exit(1)
    """)
    outcome = run_local(
        replace(config, environment=environment), run_folder, command, environment, lambda event: None, 20
    )
    assert outcome.reason == "exit code 1: failed with ***"
    assert "seen" in run_folder.log.read_text()
    for path in run_folder.path.iterdir():
        text = path.read_text()
        for secret in (token, "with odd", password):
            assert secret not in text, path.name


def test_run_outside_the_main_thread(launch):
    runs = []
    thread = threading.Thread(target=lambda: runs.append(launch("write(RunEnded(status='ok'))")))
    thread.start()
    thread.join()
    assert runs[0].outcome.status == "ok"
