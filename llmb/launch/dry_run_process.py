"""Starts a rehearsal in a process of its own: torch takes seconds to import, and the desk side does without it."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from llmb.config.serialization import build, to_json
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError, LaunchError
from llmb.launch.command import engine_environment
from llmb.launch.run_folder import CONFIG_FILE
from llmb.perfmodel.dry_run_summary import Rehearsal

MODULE = "llmb.train.dry_run.dry_run"


def rehearse(config: RunConfig) -> Rehearsal:
    """What one rank of the run holds, computes and sends in a step."""
    if config.workload.kind != "training":
        raise ConfigError(f"--memory: runs of kind training can be rehearsed, not those of kind {config.workload.kind}")
    if find_spec("torch") is None:
        raise ConfigError("--memory needs torch, which is not installed: pip install 'llmb[engine]'")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIG_FILE)
        path.write_text(to_json(config))
        environment = {**os.environ, **engine_environment(config, os.environ, {}), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", MODULE, str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines, said = done.stdout.splitlines(), done.stderr.strip().splitlines()
    if done.returncode == ConfigError.exit_code and len(said) == 1:
        raise ConfigError(f"--memory: {said[0]}")
    if done.returncode or not lines:
        raise LaunchError(f"the rehearsal of {config.name} failed: {said[-1] if said else f'exit {done.returncode}'}")
    return build(Rehearsal, json.loads(lines[-1]), "rehearsal")
