"""Run what needs torch in a separate process: importing torch takes seconds, and the command line does without it.

run_dry_run(config) -> DryRunSummary    one rank of a training run on the meta device
run_probe("cuda", print) -> dict of rates        copies and matmuls of this machine
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmb.config.serialization import build, to_json
from llmb.config.spec import RunConfig
from llmb.errors import ConfigError, LaunchError
from llmb.launch.command import engine_environment, engine_install_command, python_path
from llmb.launch.run_folder import CONFIG_FILE
from llmb.perfmodel.dry_run_summary import DryRunSummary

DRY_RUN_MODULE = "llmb.train.dry_run.dry_run"
PROBE_MODULE = "llmb.offload.machine_probe"
PROGRESS_PREFIX = "probe: "  # of each progress line on stderr


def run_dry_run(config: RunConfig, on_progress: Callable[[float], None] = lambda seconds: None) -> DryRunSummary:
    """Return what one rank of the run allocates, computes and sends in a step.

    `on_progress` is called at once and then every second, with the seconds so far.
    """
    if config.workload.kind != "training":
        raise ConfigError(f"--memory: only training runs have a dry run, not those of kind {config.workload.kind}")
    require_torch("--memory")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIG_FILE)
        path.write_text(to_json(config))
        environment = {**os.environ, **engine_environment(config, os.environ, {}), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", DRY_RUN_MODULE, str(path)]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            stdout, stderr = _wait(process, on_progress)
    stdout_lines, stderr_lines = stdout.splitlines(), stderr.strip().splitlines()
    if process.returncode == ConfigError.exit_code and len(stderr_lines) == 1:
        raise ConfigError(f"--memory: {stderr_lines[0]}")
    if process.returncode or not stdout_lines:
        reason = stderr_lines[-1] if stderr_lines else f"exit {process.returncode}"
        raise LaunchError(f"the dry run of {config.name} failed: {reason}")
    return build(DryRunSummary, json.loads(stdout_lines[-1]), "dry run")


def _wait(process: subprocess.Popen[str], on_progress: Callable[[float], None]) -> tuple[str, str]:
    """Return the output of a process; report every second that it still runs."""
    start = time.monotonic()
    while True:
        on_progress(time.monotonic() - start)
        try:
            return process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired:
            continue
        except BaseException:  # nobody waits for it any more
            process.kill()
            raise


def run_probe(
    device: str,
    on_progress: Callable[[str], None],
    shapes: Sequence[tuple[int, int, int]] = (),
    disk_path: str | None = None,
) -> dict[str, Any]:
    """Return the rates of a device, `cuda` or `cpu`, of GEMMs of these shapes, and of a folder's disk, by name."""
    require_torch("probe")
    disk = [] if disk_path is None else [disk_path]
    return measure_in([sys.executable, "-m", PROBE_MODULE, device, json.dumps(shapes), *disk], on_progress)


def measure_in(command: Sequence[str], on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run a process that prints progress on stderr and one line of JSON on stdout; return the JSON."""
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    last_line = ""
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            for line in process.stderr or ():
                if line.startswith(PROGRESS_PREFIX):
                    on_progress(line.removeprefix(PROGRESS_PREFIX).strip())
                last_line = line.strip() or last_line
            output = process.stdout.read() if process.stdout else ""
        except BaseException:  # nobody waits for it any more
            process.kill()
            raise
    if process.returncode or not output.strip():
        raise LaunchError(f"the probe failed: {last_line or f'exit {process.returncode}'}")
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    return measured


def require_torch(command: str) -> None:
    """Raise a ConfigError where torch is not installed."""
    if find_spec("torch") is None:
        raise ConfigError(f"{command} needs torch, which is not installed: {engine_install_command()}")
