"""Every way in which one rank can ruin a run of several, done for real: four ranks over gloo, started by torchrun.

A fault is put in from outside, by a program that changes one function of the engine on one rank before it starts, or by
a signal. Each run must end within a minute of its fault with a named status, the guilty rank and that rank's last
lines, with all events up to the last step, and with no process left.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmb.config.serialization import build, to_json
from llmb.config.spec import Limits, Machine, Parallel, Precision, RunConfig, Training
from llmb.events import Event, RunStarted, StepDone, read, read_all
from llmb.launch import hang_detector
from llmb.launch.local import Outcome, run_local
from llmb.launch.run_folder import RunDir
from llmb.results.derive import derive
from llmb.results.result import Result

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]
RANKS = 4
FAULTY_ENGINE = """
import os, sys, time
from pathlib import Path
from llmb.runtime.engine_process import Process, leave
from llmb.train.__main__ import training

RANK = int(os.environ["RANK"])

def happens():
    Path("fault").touch()

def faulty():
    import torch
    from llmb.train import loop
    train_step, ready_parts = loop.train_step, loop.ready_parts
{fault}
    return training()

leave(Process("llmb.train", faulty).main(sys.argv[1:]))
"""


@dataclass
class Fault:
    """How a run with a fault in it ended."""

    outcome: Outcome
    result: Result
    rundir: RunDir
    seconds: float  # from the fault to the end

    def steps(self, rank: int) -> list[int]:
        return [event.step for event in read(self.rundir.events(rank)) if isinstance(event, StepDone)]

    @property
    def last_lines(self) -> str:
        return "\n".join(self.result.last_lines)

    def check(self, status: str, rank: int | None, steps_before: int) -> None:
        """What holds for every fault."""
        assert (self.result.status, self.result.guilty_rank) == (status, rank), self.rundir.log.read_text()
        assert self.outcome.guilty_rank == rank
        assert self.seconds < 60
        assert [self.steps(r)[:steps_before] for r in range(RANKS)] == [list(range(1, steps_before + 1))] * RANKS
        assert living_in(self.rundir.path) == []


def living_in(folder: Path) -> list[str]:
    """Processes that work in a folder, as all of an engine's do: torchrun, ranks, and who labels their lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
        except OSError:
            continue  # gone, or not ours
    return found


@pytest.fixture
def four(config: RunConfig) -> RunConfig:
    return replace(
        config,
        machine=Machine(gpu="cpu", gpus=RANKS, gpus_per_node=RANKS),
        parallel=Parallel(dp=RANKS),
        precision=Precision(dtype="fp32"),
        workload=Training(seqlen=16, mbs=1, gbs=RANKS, ga=1, steps=10**6, window=(2, 10**6)),
        limits=Limits(stall_limit_s=6),
    )


@pytest.fixture
def run_with(four: RunConfig, rundir: RunDir, tmp_path: Path) -> Callable[..., Fault]:
    """Run the engine with a fault, to the end that it brings about."""

    def run(fault: str = "", on_event: Callable[[Event], None] = lambda event: None, config: RunConfig = four) -> Fault:
        script = tmp_path / "faulty.py"
        script.write_text(FAULTY_ENGINE.replace("{fault}", textwrap.indent(textwrap.dedent(fault), "    ")))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [sys.executable, *torchrun, str(script), "config.json"]
        rundir.config.write_text(to_json(config))
        outcome = run_local(config, rundir, command, {"OMP_NUM_THREADS": "1"}, on_event, timeout_s=150, grace_s=4)
        seconds = time.time() - (rundir.path / "fault").stat().st_mtime
        result = derive(config, read_all(rundir.all_events()))
        return Fault(outcome, result, rundir, seconds)

    return run


def signal_rank(rundir: RunDir, rank: int, number: signal.Signals) -> None:
    (pid,) = [event.pid for event in read(rundir.events(rank)) if isinstance(event, RunStarted)]
    (rundir.path / "fault").touch()
    os.kill(pid, number)


def test_a_rank_that_is_killed_as_a_user_sees_it() -> None:
    wish = "submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 4 --proxy --json --set steps=1000000"
    command = [sys.executable, "-m", "llmb.cli.llmb_run", *wish.split()]
    submit = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rundir = wait_for(lambda: next(RunDir.find_all(Path(os.environ["LLMB_INSTALL"])), None))
    wait_for(lambda: any(isinstance(event, StepDone) for event in read(rundir.events(0))))
    signal_rank(rundir, 2, signal.SIGKILL)
    killed_at = time.monotonic()
    out, err = submit.communicate(timeout=60)
    assert time.monotonic() - killed_at < 60
    assert submit.returncode == 2
    result = build(Result, json.loads(out.splitlines()[-1]))
    assert (result.status, result.guilty_rank) == ("failed", 2)
    assert result.reason == "rank 2: killed by signal 9 (SIGKILL)"
    assert result.steps_done is not None
    assert f"failed ({result.reason})" in err
    assert living_in(rundir.path) == []


def wait_for(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def test_a_rank_that_is_stopped(run_with, rundir) -> None:
    def on_event(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            signal_rank(rundir, 3, signal.SIGSTOP)

    fault = run_with(on_event=on_event)
    fault.check("failed", 3, steps_before=2)
    assert fault.result.reason.startswith("hung: no rank made progress for 6 s after step ")
    assert fault.result.reason.endswith("; rank 3 did not answer: stopped, or busy inside a library")


def test_a_rank_that_never_comes_to_the_collective(run_with) -> None:
    fault = run_with("""
        def hang(job, parts, optimizer, step):
            if RANK == 1 and step == 3:
                print("waiting for a file that nobody writes")
                happens()
                while True:
                    time.sleep(1)
            return train_step(job, parts, optimizer, step)
        loop.train_step = hang
    """)
    fault.check("failed", 1, steps_before=2)
    assert fault.result.reason.startswith("hung: no rank made progress for 6 s after step 2; rank 1 has not entered ")
    assert "waiting for a file that nobody writes" in fault.last_lines
    assert "in hang" in fault.last_lines  # the stack, as Python prints it


def test_a_rank_that_sleeps_in_the_first_step(run_with, four, monkeypatch) -> None:
    monkeypatch.setattr(hang_detector, "IDLE_S", 6)  # how long a first step takes nobody knows, but it takes CPU time
    unlimited = replace(four, limits=Limits())
    fault = run_with(
        """
        def hang(job, parts, optimizer, step):
            if RANK == 3:
                happens()
                time.sleep(1000)
            return train_step(job, parts, optimizer, step)
        loop.train_step = hang
        """,
        config=unlimited,
    )
    fault.check("failed", 3, steps_before=0)
    assert "before the first step ended; rank 3 has not entered the collective" in fault.result.reason


def test_a_rank_that_throws(run_with) -> None:
    fault = run_with("""
        def throw(job, parts, optimizer, step):
            if RANK == 2 and step == 3:
                happens()
                raise ValueError("no such layer, hf_abcdefghijklmnopqrstuvwxyz")
            return train_step(job, parts, optimizer, step)
        loop.train_step = throw
    """)
    fault.check("failed", 2, steps_before=2)
    assert fault.result.reason.startswith("rank 2: ValueError: no such layer")
    assert "Traceback" in fault.last_lines
    assert "ValueError: no such layer, ***" in fault.last_lines


def test_a_rank_that_runs_out_of_memory(run_with) -> None:
    fault = run_with("""
        def exhaust(job, parts, optimizer, step):
            if RANK == 3 and step == 3:
                happens()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return train_step(job, parts, optimizer, step)
        loop.train_step = exhaust
    """)
    fault.check("oom", 3, steps_before=2)
    assert fault.result.reason.startswith("rank 3: out of memory at a peak of ")
    assert "out of memory at a peak of " in fault.last_lines


def test_a_rank_that_is_slow_and_another_whose_weights_are_lost(run_with) -> None:
    fault = run_with("""
        def lose(job, parts, optimizer, step):
            if RANK == 1:
                time.sleep(0.3)
            if RANK == 2 and step == 8:
                happens()
                with torch.no_grad():
                    weight = next(p for n, p in parts[0].named_parameters() if "layers.1" in n and p.ndim > 1)
                    weight.to_local().view(-1)[:3] = float("nan")
            return train_step(job, parts, optimizer, step)
        loop.train_step = lose
    """)
    fault.check("diverged", 2, steps_before=8)
    assert fault.result.reason.startswith("loss became nan at step 8: nan in the weight layers.1.")
    assert fault.result.reason.endswith(", on rank 2")
    (slow,) = [warning.text for warning in fault.result.warnings if warning.code == "SLOW_RANK"]
    who, _, more = slow.partition(" holds the others up: ")
    assert who == f"rank 1 on {os.uname().nodename}"
    assert float(more.split()[0]) >= 0.3  # s of own work a step; more where the machine has other things to do
