"""Faults of one rank in a run of several: real ranks over gloo, started by torchrun.

A fault is injected from outside, by a program that patches one function of the engine on one rank before it starts, or
by a signal. Each run must end within a minute of its fault with a status, the failed rank and that rank's last lines,
with all events up to the last step, and with no process left.
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
from llmb.launch.local import RunOutcome, run_local
from llmb.launch.run_folder import RunFolder
from llmb.results.derive import derive
from llmb.results.result import Result

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]
FAULTY_ENGINE = """
import os, sys, time
from pathlib import Path
from llmb.runtime.engine_process import EngineProcess, exit_now
from llmb.train.__main__ import load_train

RANK = int(os.environ["RANK"])

def mark_fault():
    Path("fault").touch()

def load_faulty_train():
    import torch
    from llmb.train import loop
    from llmb.train.parallel.fsdp import sharded_parameters
    train_step, build_model_parts = loop.train_step, loop.build_model_parts
{fault}
    return load_train()

exit_now(EngineProcess("llmb.train", load_faulty_train).main(sys.argv[1:]))
"""


@dataclass
class FaultyRun:
    """Outcome of a run with an injected fault."""

    outcome: RunOutcome
    result: Result
    run_folder: RunFolder
    seconds: float  # from the fault to the end
    ranks: int

    def steps(self, rank: int) -> list[int]:
        return [event.step for event in read(self.run_folder.events(rank)) if isinstance(event, StepDone)]

    @property
    def last_lines(self) -> str:
        return "\n".join(self.result.last_lines)

    def check(self, status: str, rank: int | None, steps_before: int) -> None:
        """Check what holds for every fault."""
        assert (self.result.status, self.result.failed_rank) == (status, rank), self.run_folder.log.read_text()
        assert self.outcome.failed_rank == rank
        assert self.seconds < 60
        assert [self.steps(r)[:steps_before] for r in range(self.ranks)] == [
            list(range(1, steps_before + 1))
        ] * self.ranks
        assert processes_in(self.run_folder.path) == []


def processes_in(folder: Path) -> list[str]:
    """Return the processes whose working directory is this folder: torchrun, ranks, and their log prefixers."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                commands.append((process / "cmdline").read_text())
        except OSError:
            continue  # exited, or of another user
    return commands


def on_ranks(ranks: int, config: RunConfig) -> RunConfig:
    return replace(
        config,
        machine=Machine(gpu="cpu", gpus=ranks, gpus_per_node=ranks),
        parallel=Parallel(dp=ranks),
        precision=Precision(dtype="fp32"),
        workload=Training(seqlen=16, mbs=1, gbs=ranks, ga=1, steps=10**6, window=(2, 10**6)),
        limits=Limits(stall_limit_s=6),
    )


@pytest.fixture
def four(config: RunConfig) -> RunConfig:
    return on_ranks(4, config)


@pytest.fixture
def run_with(four: RunConfig, run_folder: RunFolder, tmp_path: Path) -> Callable[..., FaultyRun]:
    """Run the engine with a fault until it ends."""

    def run(
        fault: str = "", on_event: Callable[[Event], None] = lambda event: None, config: RunConfig = four
    ) -> FaultyRun:
        script = tmp_path / "faulty.py"
        script.write_text(FAULTY_ENGINE.replace("{fault}", textwrap.indent(textwrap.dedent(fault), "    ")))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.machine.gpus)]
        command = [sys.executable, *torchrun, str(script), "config.json"]
        run_folder.config.write_text(to_json(config))
        outcome = run_local(config, run_folder, command, {"OMP_NUM_THREADS": "1"}, on_event, timeout_s=150, grace_s=4)
        seconds = time.time() - (run_folder.path / "fault").stat().st_mtime
        result = derive(config, read_all(run_folder.all_events()))
        return FaultyRun(outcome, result, run_folder, seconds, config.machine.gpus)

    return run


def signal_rank(run_folder: RunFolder, rank: int, number: signal.Signals) -> None:
    (pid,) = [event.pid for event in read(run_folder.events(rank)) if isinstance(event, RunStarted)]
    (run_folder.path / "fault").touch()
    os.kill(pid, number)


def test_rank_killed_under_llmb_run_submit() -> None:
    arguments = "submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 2 --proxy --json --set steps=1000000"
    command = [sys.executable, "-m", "llmb.cli.llmb_run", *arguments.split()]
    submit = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_folder = wait_for(lambda: next(RunFolder.find_all(Path(os.environ["LLMB_INSTALL"])), None))
    wait_for(lambda: any(isinstance(event, StepDone) for event in read(run_folder.events(0))))
    signal_rank(run_folder, 1, signal.SIGKILL)
    killed_at = time.monotonic()
    out, err = submit.communicate(timeout=60)
    assert time.monotonic() - killed_at < 60
    assert submit.returncode == 2
    result = build(Result, json.loads(out.splitlines()[-1]))
    assert (result.status, result.failed_rank) == ("failed", 1)
    assert result.reason == "rank 1: killed by signal 9 (SIGKILL)"
    assert result.steps_done is not None
    assert f"failed ({result.reason})" in " ".join(err.split())  # whose lines are folded
    assert processes_in(run_folder.path) == []


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def test_rank_stopped_by_sigstop(run_with, run_folder, config) -> None:
    def on_event(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            signal_rank(run_folder, 1, signal.SIGSTOP)

    fault = run_with(on_event=on_event, config=on_ranks(2, config))
    fault.check("failed", 1, steps_before=2)
    assert fault.result.reason.startswith("hung: no rank made progress for 6 s after step ")
    assert fault.result.reason.endswith("; rank 1 did not respond: stopped, or busy inside a library")


@pytest.mark.nightly
def test_rank_that_never_enters_the_collective(run_with) -> None:
    fault = run_with("""
        def hang(job, parts, optimizer, step):
            if RANK == 1 and step == 3:
                print("waiting for a file that nobody writes")
                mark_fault()
                while True:
                    time.sleep(1)
            return train_step(job, parts, optimizer, step)
        loop.train_step = hang
    """)
    fault.check("failed", 1, steps_before=2)
    assert fault.result.reason.startswith("hung: no rank made progress for 6 s after step 2; rank 1 has not entered ")
    assert "waiting for a file that nobody writes" in fault.last_lines
    assert "in hang" in fault.last_lines  # the stack, as Python prints it


@pytest.mark.nightly
def test_rank_that_sleeps_in_the_first_step(run_with, four, monkeypatch) -> None:
    monkeypatch.setattr(hang_detector, "IDLE_LIMIT_S", 6)  # the first step has no time limit, but it uses CPU time
    unlimited = replace(four, limits=Limits())
    fault = run_with(
        """
        def hang(job, parts, optimizer, step):
            if RANK == 3:
                mark_fault()
                time.sleep(1000)
            return train_step(job, parts, optimizer, step)
        loop.train_step = hang
        """,
        config=unlimited,
    )
    fault.check("failed", 3, steps_before=0)
    assert "before the first step ended; rank 3 has not entered the collective" in fault.result.reason


@pytest.mark.nightly
def test_rank_that_raises(run_with) -> None:
    fault = run_with("""
        def throw(job, parts, optimizer, step):
            if RANK == 2 and step == 3:
                mark_fault()
                raise ValueError("no such layer, hf_abcdefghijklmnopqrstuvwxyz")
            return train_step(job, parts, optimizer, step)
        loop.train_step = throw
    """)
    fault.check("failed", 2, steps_before=2)
    assert fault.result.reason.startswith("rank 2: ValueError: no such layer")
    assert "Traceback" in fault.last_lines
    assert "ValueError: no such layer, ***" in fault.last_lines


@pytest.mark.nightly
def test_rank_out_of_memory(run_with) -> None:
    fault = run_with("""
        def exhaust(job, parts, optimizer, step):
            if RANK == 3 and step == 3:
                mark_fault()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return train_step(job, parts, optimizer, step)
        loop.train_step = exhaust
    """)
    fault.check("oom", 3, steps_before=2)
    assert fault.result.reason.startswith("rank 3: out of memory at a peak of ")
    assert "out of memory at a peak of " in fault.last_lines


@pytest.mark.nightly
def test_slow_rank_and_nan_weights_on_another(run_with) -> None:
    fault = run_with("""
        def lose(job, parts, optimizer, step):
            if RANK == 1:
                time.sleep(0.3)
            if RANK == 2 and step == 8:
                mark_fault()
                with torch.no_grad():
                    values = sharded_parameters(parts[0]).own_values()
                    next(x for n, x in values if "layers.1" in n and len(x))[:3] = float("nan")
            return train_step(job, parts, optimizer, step)
        loop.train_step = lose
    """)
    fault.check("diverged", 2, steps_before=8)
    assert fault.result.reason.startswith("loss became nan at step 8: nan in the weight layers.1.")
    assert fault.result.reason.endswith(", on rank 2")
    (slow,) = [warning.text for warning in fault.result.warnings if warning.code == "SLOW_RANK"]
    rank_and_host, _, excess = slow.partition(" holds the others up: ")
    assert rank_and_host == f"rank 1 on {os.uname().nodename}"
    assert float(excess.split()[0]) >= 0.3  # s of work per step; more on a busy machine
