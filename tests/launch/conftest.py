"""A small configuration, runs that have ended, and fake engines: real processes that write real events."""

import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import pytest
from small_models import llama_model

from llmb import events
from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training
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
        model=llama_model(name="tiny", hidden=8, ffn=16, heads=2, kv_heads=1, vocab=32),
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


@pytest.fixture
def make_run(config):
    """Create a run that has ended, with the files every run has."""

    def make(install: Path, second: int = 0, host: str = "node1", job_id: str = "L1", name: str = "") -> RunFolder:
        named = replace(config, name=name or config.name)
        run = RunFolder.create(install, named, datetime(2026, 1, 2, 3, 4, second))
        events.append(run.events(0), events.RunStarted(time=1000.0 + second, host=host))
        events.append(run.events(0), events.RunEnded(time=1001.0 + second, status="ok"))
        run.log.write_text("iteration 1: fast\n")
        run.write_job_script("#!/bin/bash\n")
        run.write_record(named, job_id)
        for path in run.path.iterdir():
            os.utime(path, (1.7e9, 1.7e9))
        return run

    return make


@pytest.fixture
def run(make_run, tmp_path) -> RunFolder:
    return make_run(tmp_path / "install")
