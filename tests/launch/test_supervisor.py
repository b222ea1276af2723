"""Supervision of a run whose llmb-run process is interrupted, terminated or killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmb import events
from llmb.errors import ConfigError
from llmb.events import RunEnded
from llmb.launch.procfs import find_process
from llmb.launch.run_files.pid_file import is_alive, live_pid
from llmb.launch.run_folder import RunFolder
from llmb.launch.run_lock import exclusive_run_lock

LAUNCHER = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from llmb.launch.local import run_local
from llmb.launch.run_lock import exclusive_run_lock
from llmb.launch.run_folder import RunFolder

run_folder = RunFolder.open(Path(sys.argv[1]))
config = run_folder.read_config()
with exclusive_run_lock(Path(sys.argv[2]), config):
    on_event = lambda event: print("event", flush=True)
    outcome = run_local(config, run_folder, sys.argv[4:], {}, on_event, timeout_s=30, grace_s=float(sys.argv[3]))
print(json.dumps(asdict(outcome)))
"""
EXITS_ON_SIGTERM = "exit_on_sigterm()\nrecord_pid()\nwrite(StepDone(step=1))\ntime.sleep(60)"
IGNORES_SIGTERM = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
record_pid()
if os.fork() == 0:
    os.setsid()
    record_pid()
    while True: time.sleep(60)
while len(Path("pids").read_text().split()) < 2: time.sleep(0.01)
write(StepDone(step=1))
while True: time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path, run_folder: RunFolder, engine) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a launcher in a process of its own, and return it once its engine has done a step."""
    launchers: list[subprocess.Popen] = []

    def run(source: str, grace_s: float = 5, preparation: Callable[[], object] | None = None) -> subprocess.Popen:
        arguments = [run_folder.path, tmp_path / "install", str(grace_s), *engine(source)]
        root = str(Path(__file__).parents[2])
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *arguments],
            env={**os.environ, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=preparation,
        )
        launchers.append(launcher)
        assert launcher.stdout.readline() == "event\n"
        return launcher

    yield run
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()


def outcome_of(launcher: subprocess.Popen) -> dict:
    return json.loads(launcher.communicate(timeout=15)[0].splitlines()[-1])


def engine_pids(run_folder: RunFolder) -> list[int]:
    return list(map(int, (run_folder.path / "pids").read_text().split()))


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_run_as_incomplete(start, run_folder, number):
    launcher = start(EXITS_ON_SIGTERM)
    launcher.send_signal(number)
    outcome = outcome_of(launcher)
    assert (outcome["status"], outcome["reason"]) == ("incomplete", f"interrupted by {number.name}")
    assert outcome["interrupted"] == number
    assert launcher.returncode == 0
    assert [find_process(pid) for pid in engine_pids(run_folder)] == [None]
    *_, last = events.read(run_folder.events(0))
    assert (last.status, last.reason) == ("incomplete", f"interrupted by {number.name}")


def test_second_ctrl_c_kills_at_once(start, run_folder):
    launcher = start(IGNORES_SIGTERM, grace_s=60)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.4)
    assert launcher.poll() is None  # the engine ignores SIGTERM, the grace period is long
    launcher.send_signal(signal.SIGINT)
    outcome = outcome_of(launcher)
    assert (outcome["status"], outcome["exit_code"]) == ("incomplete", -9)
    assert [find_process(pid) for pid in engine_pids(run_folder)] == [None, None]


@pytest.mark.slow
def test_signal_ignored_by_nohup_stays_ignored(start):
    launcher = start(
        "while not Path('go').exists(): write(StepDone(step=1)); time.sleep(0.05)\nwrite(RunEnded(status='ok'))",
        preparation=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    folder = Path(launcher.args[3])
    (folder / "go").touch()
    assert outcome_of(launcher)["status"] == "ok"


def test_engine_records_its_end_after_kill_9_of_the_launcher(start, run_folder):
    launcher = start(EXITS_ON_SIGTERM)
    assert is_alive(run_folder)
    launcher.kill()
    wait_until(lambda: not is_alive(run_folder))
    assert [find_process(pid) for pid in engine_pids(run_folder)] == [None]
    ends = [event for event in events.read(run_folder.events(0)) if isinstance(event, RunEnded)]
    assert [(end.status, end.reason) for end in ends] == [("incomplete", "interrupted by SIGTERM")]


def test_engine_that_ignores_sigterm_is_killed_after_kill_9_of_the_launcher(start, run_folder):
    launcher = start(IGNORES_SIGTERM, grace_s=0.5)
    launcher.kill()
    wait_until(lambda: not is_alive(run_folder))
    assert [find_process(pid) for pid in engine_pids(run_folder)] == [None, None]
    *_, last = events.read(run_folder.events(0))
    assert (last.status, last.reason) == ("incomplete", "llmb-run ended before the run did")
    assert run_folder.read_config().name == run_folder.name


def test_kill_9_of_the_supervisor_ends_the_engine(start, run_folder):
    launcher = start(EXITS_ON_SIGTERM)
    os.kill(live_pid(run_folder), signal.SIGKILL)
    outcome = outcome_of(launcher)
    assert (outcome["status"], outcome["reason"]) == ("failed", "the supervisor of the engine was killed")
    wait_until(lambda: not any(find_process(pid) for pid in engine_pids(run_folder)))  # a process takes a moment to die


def test_second_run_of_an_experiment_is_refused_until_the_first_has_ended(start, run_folder, config, tmp_path):
    launcher = start(IGNORES_SIGTERM, grace_s=1)
    pid = live_pid(run_folder)
    expected = f"already running (pid {pid}, folder {run_folder.path}); wait for it or stop it"
    with pytest.raises(ConfigError) as refused, exclusive_run_lock(tmp_path / "install", config):
        pass
    assert expected in str(refused.value)
    launcher.kill()
    launcher.wait()
    with pytest.raises(ConfigError) as refused, exclusive_run_lock(tmp_path / "install", config):
        pass  # the kernel has freed the lock, but the engine still occupies the machine
    assert expected in str(refused.value)
    wait_until(lambda: not is_alive(run_folder))
    with exclusive_run_lock(tmp_path / "install", config):
        pass
