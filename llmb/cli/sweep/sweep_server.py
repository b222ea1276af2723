"""Server of a sweep: `llmb-run serve` in a process of its own, started once per variant and ended with the sweep."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmb.errors import LaunchError
from llmb.launch.engine_log import open_log
from llmb.launch.server_process import terminate_with_parent
from llmb.loadgen.readiness import get

READY_S = 1200.0  # weights, compilation, graphs
STOP_S = 60.0
POLL_S = 0.3
MODEL_NAME = "sweep"


class SweepServer:
    """One running server; use as a context manager."""

    def __init__(self, arguments: Sequence[str], log: Path, max_queue: int):
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = log
        self._command = [
            sys.executable, "-m", "llmb.cli.llmb_run", "serve", *arguments, "--port", str(self._port),
            "--served-model-name", MODEL_NAME, "--max-queue", str(max_queue), "--no-prefix-cache",
        ]  # fmt: skip
        self._process: subprocess.Popen[Any] | None = None

    def __enter__(self) -> "SweepServer":
        with open(open_log(self._log), "ab") as log:
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
            try:
                if get(self.url, "/health", None)[0] == 200:
                    return
            except Exception:  # not listening yet, or half a response
                pass
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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
