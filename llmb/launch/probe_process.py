"""Starts the probe of this machine in a process of its own: the desk side does without torch."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from llmb.errors import ConfigError, LaunchError
from llmb.launch.command import python_path

MODULE = "llmb.offload.machine_probe"
MARK = "probe: "  # before each line on how far it is


def probe(device: str, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """The rates of a device, `cuda` or `cpu`, by name."""
    if find_spec("torch") is None:
        raise ConfigError("probe needs torch, which is not installed: pip install 'llmb[engine]'")
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))}
    command = [sys.executable, "-m", MODULE, device]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    last = ""
    with subprocess.Popen(command, env=environment, **pipes) as started:
        try:
            for line in started.stderr or ():
                if line.startswith(MARK):
                    on_progress(line.removeprefix(MARK).strip())
                last = line.strip() or last
            found = started.stdout.read() if started.stdout else ""
        except BaseException:  # nobody waits for it any more
            started.kill()
            raise
    if started.returncode or not found.strip():
        raise LaunchError(f"the probe failed: {last or f'exit {started.returncode}'}")
    measured: dict[str, Any] = json.loads(found.splitlines()[-1])
    return measured
