"""A small configuration, and stand-in engines: real processes that write real events."""

import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from llmb import events
from llmb.config.spec import Machine, Model, Parallel, Precision, RunConfig, Training
from llmb.launch.local import Outcome, run_local
from llmb.launch.run_folder import RunDir

ENGINE_PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from llmb.events import RunEnded, RunStarted, StepDone, append

def write(event, rank=0):
    append(Path(f"events.rank{rank}.jsonl"), event)

def note_pid():
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")

def end_on_sigterm():
    def end(*_):
        write(RunEnded(time=time.time(), status="incomplete", reason="interrupted by SIGTERM"))
        os._exit(143)
    signal.signal(signal.SIGTERM, end)

"""


@pytest.fixture
def config() -> RunConfig:
    return RunConfig(
        name="pretrain_tiny_8b_bf16_gpus1",
        target="pretrain_tiny",
        size="8b",
        machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1),
        model=Model(
            name="tiny", architecture="llama", layers=2, hidden=8, ffn=16, heads=2, kv_heads=1, head_dim=4, vocab=32
        ),
        parallel=Parallel(),
        precision=Precision(dtype="bf16"),
        workload=Training(seqlen=16, mbs=1, gbs=1, ga=1, steps=3, window=(2, 3)),
    )


@pytest.fixture
def rundir(tmp_path: Path, config: RunConfig) -> RunDir:
    return RunDir.create(tmp_path / "install", config, datetime(2026, 1, 2, 3, 4, 5))


@pytest.fixture
def engine(tmp_path: Path) -> Callable[[str], list[str]]:
    """The command that runs a stand-in engine of this source."""

    def write(source: str) -> list[str]:
        script = tmp_path / "engine.py"
        script.write_text(ENGINE_PRELUDE + textwrap.dedent(source))
        return [sys.executable, str(script)]

    return write


@dataclass
class Ran:
    """What a run gave back, and what it left behind."""

    outcome: Outcome
    streamed: list[events.Event]
    rundir: RunDir

    @property
    def stored(self) -> list[events.Event]:
        return list(events.read(self.rundir.events(0)))

    @property
    def log(self) -> str:
        return self.rundir.log.read_text()


@pytest.fixture
def launch(config: RunConfig, rundir: RunDir, engine: Callable[[str], list[str]]) -> Callable[..., Ran]:
    """Run a stand-in engine to its end."""

    def run(source: str, environment: dict[str, str] | None = None, timeout_s: float = 20, grace_s: float = 5) -> Ran:
        streamed: list[events.Event] = []
        outcome = run_local(config, rundir, engine(source), environment or {}, streamed.append, timeout_s, grace_s)
        return Ran(outcome, streamed, rundir)

    return run
