"""Server of a sweep: `llmb-run serve` in a process of its own, started once per variant and ended with the sweep."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmb.errors import LaunchError
from llmb.launch.engine_log import open_log
from llmb.launch.server_process import terminate_with_parent

READY_S = 1200.0  # weights, compilation, graphs
STOP_S = 60.0
POLL_S = 0.3
MODEL_NAME = "sweep"
SERVING = re.compile(rb"^serving \S+ at (http://\S+)/v1 ", re.MULTILINE)  # printed when a server is ready


class SweepServer:
    """One running server; use as a context manager."""

    def __init__(self, arguments: Sequence[str], log: Path, max_queue: int):
        self.url = ""  # known once the server is ready
        self._log = log
        self._command = [
            sys.executable, "-m", "llmb.cli.llmb_run", "serve", *arguments, "--port", "0",
            "--served-model-name", MODEL_NAME, "--max-queue", str(max_queue), "--no-prefix-cache",
        ]  # fmt: skip
        self._process: subprocess.Popen[Any] | None = None
        self._log_start = 0

    def __enter__(self) -> "SweepServer":
        with open(open_log(self._log), "ab") as log:
            self._log_start = log.tell()  # the log of a variant may follow that of another
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then ends the server
                preexec_fn=terminate_with_parent(),
            )
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise LaunchError(f"llmb-run serve ended with {code}: {self._last_line()} (log: {self._log})")
            if match := SERVING.search(self._log.read_bytes()[self._log_start :]):
                self.url = match[1].decode()
                return
            time.sleep(POLL_S)
        raise LaunchError(f"llmb-run serve was not ready after {READY_S:g} s (log: {self._log})")

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it printed nothing"

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
