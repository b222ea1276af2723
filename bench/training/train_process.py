"""A training run in processes of its own, as `python -m llmb.train` starts it, and its steps."""

import os
import subprocess
import sys
from pathlib import Path

from llmb.config.serialization import to_json
from llmb.config.spec import RunConfig
from llmb.errors import LaunchError
from llmb.events import StepDone, read
from llmb.launch.command import engine_environment

ROOT = Path(__file__).resolve().parents[2]


def trained_steps(config: RunConfig, folder: Path) -> list[StepDone]:
    """Train on all ranks of a configuration, in a new folder or an empty one; raise a LaunchError if that fails."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(to_json(config))
    ranks = config.parallel.world_size
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, **engine_environment(config, os.environ, {}), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, "-m", "llmb.train", "config.json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"{folder.name} failed: {done.stderr.strip()[-500:]}")
    return [event for event in read(folder / "events.rank0.jsonl") if isinstance(event, StepDone)]
