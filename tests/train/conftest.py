"""Fixtures that train a small configuration with some fields changed, and its events."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from config_changes import changed
from small_config import CONFIG

from llmb.config.serialization import to_plain
from llmb.events import RunEnded, RunStarted, StepDone, read
from llmb.runtime.recorder import EventRecorder
from llmb.train.__main__ import run


@dataclass
class Outcome:
    """Run folder and exit code of a run, or the process that runs it."""

    folder: Path
    code: int | None = None
    process: subprocess.Popen | None = None

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def events(self, rank: int = 0) -> list:
        return list(read(self.folder / f"events.rank{rank}.jsonl"))

    def started(self, rank: int = 0) -> RunStarted:
        (event,) = [e for e in self.events(rank) if isinstance(e, RunStarted)]
        return event

    def steps(self, rank: int = 0) -> list[StepDone]:
        return [e for e in self.events(rank) if isinstance(e, StepDone)]

    def losses(self, rank: int = 0) -> list[float | None]:
        return [step.loss for step in self.steps(rank)]

    def ended(self, rank: int = 0) -> RunEnded:
        *before, last = self.events(rank)
        assert isinstance(last, RunEnded)
        assert not any(isinstance(e, RunEnded) for e in before)
        return last

    def refusal(self) -> str:
        """Return why the run was refused, before its first step."""
        assert (self.code, self.ended().status, self.steps()) == (1, "failed", [])
        return self.ended().reason


@pytest.fixture(autouse=True)
def offload_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmb.train.activation_offload.MIN_BYTES", 1)


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., Path]:
    """Write the changed configuration into a new run folder."""

    def write(**changes: Any) -> Path:
        folder = tmp_path / f"run {len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(to_plain(changed(CONFIG, **changes))))
        return folder

    return write


@pytest.fixture
def trained(folder_of: Callable[..., Path]) -> Callable[..., Outcome]:
    """Train the changed configuration in this process."""

    def train(**changes: Any) -> Outcome:
        folder = folder_of(**changes)
        return Outcome(folder, run(folder / "config.json", EventRecorder(folder, 0)))

    return train


@pytest.fixture
def start(folder_of: Callable[..., Path]) -> Callable[..., Outcome]:
    """Start the changed configuration as a user would, on one or more ranks."""

    def start(ranks: int = 1, **changes: Any) -> Outcome:
        folder = folder_of(**changes)
        launcher = ["-m"]
        if ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        process = subprocess.Popen(
            [sys.executable, *launcher, "llmb.train", str(folder / "config.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return Outcome(folder, process=process)

    return start
