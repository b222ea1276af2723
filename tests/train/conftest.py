"""Fixtures that train a small configuration with some fields changed, and its events."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_config import CONFIG, changed

from llmb.config.serialization import to_plain
from llmb.events import RunEnded, RunStarted, StepDone, read
from llmb.runtime.recorder import EventRecorder
from llmb.train.__main__ import run


@dataclass
class Outcome:
    """Run folder and exit code of a run."""

    folder: Path
    code: int | None = None

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
def start(folder_of: Callable[..., Path]) -> Callable[..., tuple[Outcome, subprocess.Popen]]:
    """Start the changed configuration as a user would, on one or more ranks."""

    def start(ranks: int = 1, **changes: Any) -> tuple[Outcome, subprocess.Popen]:
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
        return Outcome(folder), process

    return start
