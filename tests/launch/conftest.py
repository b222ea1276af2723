"""A small configuration, and fake engines: real processes that write real events."""

import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from llmb import events
from llmb.config.spec import Machine, Model, Parallel, Precision, RunConfig, Training
from llmb.launch.local import RunOutcome, run_local
from llmb.launch.run_folder import RunFolder

ENGINE_PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from llmb.events import RunEnded, RunStarted, StepDone, append

def write(event, rank=0):
    append(Path(f"events.rank{rank}.jsonl"), event)

def record_pid():
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")

def exit_on_sigterm():
    def on_sigterm(*_):
        write(RunEnded(time=time.time(), status="incomplete", reason="interrupted by SIGTERM"))
        os._exit(143)
    signal.signal(signal.SIGTERM, on_sigterm)

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
def run_folder(tmp_path: Path, config: RunConfig) -> RunFolder:
    return RunFolder.create(tmp_path / "install", config, datetime(2026, 1, 2, 3, 4, 5))


@pytest.fixture
def engine(tmp_path: Path) -> Callable[[str], list[str]]:
    """Write a fake engine of this source and return its command."""

    def write(source: str) -> list[str]:
        script = tmp_path / "engine.py"
        script.write_text(ENGINE_PRELUDE + textwrap.dedent(source))
        return [sys.executable, str(script)]

    return write


@dataclass
class FinishedRun:
    """Outcome, events and folder of a run."""

    outcome: RunOutcome
    streamed: list[events.Event]
    run_folder: RunFolder

    @property
    def stored(self) -> list[events.Event]:
        return list(events.read(self.run_folder.events(0)))

    @property
    def log(self) -> str:
        return self.run_folder.log.read_text()


@pytest.fixture
def launch(config: RunConfig, run_folder: RunFolder, engine: Callable[[str], list[str]]) -> Callable[..., FinishedRun]:
    """Run a fake engine to its end."""

    def run(
        source: str, environment: dict[str, str] | None = None, timeout_s: float = 20, grace_s: float = 5
    ) -> FinishedRun:
        streamed: list[events.Event] = []
        outcome = run_local(config, run_folder, engine(source), environment or {}, streamed.append, timeout_s, grace_s)
        return FinishedRun(outcome, streamed, run_folder)

    return run
