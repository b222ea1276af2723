"""What becomes of a run when the llmb-run process itself is interrupted, ended or killed."""

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
from llmb.launch.procfs import find
from llmb.launch.run_folder import RunDir, is_alive, live_pid
from llmb.launch.run_lock import running_alone

LAUNCHER = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from llmb.launch.local import run_local
from llmb.launch.run_lock import running_alone
from llmb.launch.run_folder import RunDir

rundir = RunDir.open(Path(sys.argv[1]))
config = rundir.read_config()
with running_alone(Path(sys.argv[2]), config):
    tell = lambda event: print("event", flush=True)
    outcome = run_local(config, rundir, sys.argv[4:], {}, tell, timeout_s=30, grace_s=float(sys.argv[3]))
print(json.dumps(asdict(outcome)))
"""
POLITE = "end_on_sigterm()\nnote_pid()\nwrite(StepDone(step=1))\ntime.sleep(60)"
DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note_pid()
if os.fork() == 0:
    os.setsid()
    note_pid()
    while True: time.sleep(60)
while len(Path("pids").read_text().split()) < 2: time.sleep(0.01)
write(StepDone(step=1))
while True: time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path, rundir: RunDir, engine) -> Iterator[Callable[..., subprocess.Popen]]:
    """A launcher in a process of its own, returned once its engine has done a step."""
    started: list[subprocess.Popen] = []

    def run(source: str, grace_s: float = 5, preparation: Callable[[], object] | None = None) -> subprocess.Popen:
        arguments = [rundir.path, tmp_path / "install", str(grace_s), *engine(source)]
        root = str(Path(__file__).parents[2])
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *arguments],
            env={**os.environ, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=preparation,
        )
        started.append(launcher)
        assert launcher.stdout.readline() == "event\n"
        return launcher

    yield run
    for launcher in started:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()


def outcome_of(launcher: subprocess.Popen) -> dict:
    return json.loads(launcher.communicate(timeout=15)[0].splitlines()[-1])


def engine_pids(rundir: RunDir) -> list[int]:
    return list(map(int, (rundir.path / "pids").read_text().split()))


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_as_incomplete(start, rundir, number):
    launcher = start(POLITE)
    launcher.send_signal(number)
    outcome = outcome_of(launcher)
    assert (outcome["status"], outcome["reason"]) == ("incomplete", f"interrupted by {number.name}")
    assert outcome["interrupted"] == number
    assert launcher.returncode == 0
    assert [find(pid) for pid in engine_pids(rundir)] == [None]
    *_, last = events.read(rundir.events(0))
    assert (last.status, last.reason) == ("incomplete", f"interrupted by {number.name}")


def test_a_second_ctrl_c_kills_at_once(start, rundir):
    launcher = start(DEAF, grace_s=60)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.4)
    assert launcher.poll() is None  # the engine is deaf, the grace time long
    launcher.send_signal(signal.SIGINT)
    outcome = outcome_of(launcher)
    assert (outcome["status"], outcome["exit_code"]) == ("incomplete", -9)
    assert [find(pid) for pid in engine_pids(rundir)] == [None, None]


def test_what_nohup_ignores_stays_ignored(start):
    launcher = start(
        "while not Path('go').exists(): write(StepDone(step=1)); time.sleep(0.05)\nwrite(RunEnded(status='ok'))",
        preparation=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    folder = Path(launcher.args[3])
    (folder / "go").touch()
    assert outcome_of(launcher)["status"] == "ok"


def test_after_kill_9_of_the_launcher_the_engine_records_its_end(start, rundir):
    launcher = start(POLITE)
    assert is_alive(rundir)
    launcher.kill()
    wait_until(lambda: not is_alive(rundir))
    assert [find(pid) for pid in engine_pids(rundir)] == [None]
    ends = [event for event in events.read(rundir.events(0)) if isinstance(event, RunEnded)]
    assert [(end.status, end.reason) for end in ends] == [("incomplete", "interrupted by SIGTERM")]


def test_after_kill_9_of_the_launcher_a_deaf_engine_is_killed_and_its_end_recorded(start, rundir):
    launcher = start(DEAF, grace_s=0.5)
    launcher.kill()
    wait_until(lambda: not is_alive(rundir))
    assert [find(pid) for pid in engine_pids(rundir)] == [None, None]
    *_, last = events.read(rundir.events(0))
    assert (last.status, last.reason) == ("incomplete", "llmb-run ended before the run did")
    assert rundir.read_config().name == rundir.name


def test_kill_9_of_the_watching_process_ends_the_engine_too(start, rundir):
    launcher = start(POLITE)
    os.kill(live_pid(rundir), signal.SIGKILL)
    outcome = outcome_of(launcher)
    assert (outcome["status"], outcome["reason"]) == ("failed", "the process that watched the engine was killed")
    wait_until(lambda: not any(find(pid) for pid in engine_pids(rundir)))  # a process takes a moment to die


def test_a_second_run_of_an_experiment_is_refused_until_the_first_is_over(start, rundir, config, tmp_path):
    launcher = start(DEAF, grace_s=1)
    pid = live_pid(rundir)
    expected = f"already running (pid {pid}, folder {rundir.path}); wait for it or stop it"
    with pytest.raises(ConfigError) as refused, running_alone(tmp_path / "install", config):
        pass
    assert expected in str(refused.value)
    launcher.kill()
    launcher.wait()
    with pytest.raises(ConfigError) as refused, running_alone(tmp_path / "install", config):
        pass  # the kernel has freed the lock, but the engine still occupies the machine
    assert expected in str(refused.value)
    wait_until(lambda: not is_alive(rundir))
    with running_alone(tmp_path / "install", config):
        pass
