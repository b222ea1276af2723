"""Processes of the client as the parent sees them: start, command, read messages, stop.

with WorkerPool(settings, api_key, size=2) as pool:
    pool.setup(); pool.command("start", start=...)
    for worker, kind, content in pool.messages(timeout_s=0.05): ...
"""

import json
import os
import pickle
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import llmb
from llmb.config.load_settings import LoadSettings
from llmb.config.serialization import to_plain
from llmb.errors import ConfigError, LaunchError
from llmb.loadgen.worker_process import LENGTH

SETUP_S = 600.0  # rendering the prompts of a large load takes time
EXIT_S = 5.0
READ_BYTES = 1 << 20


class WorkerPool:
    """All processes of one load; use as a context manager, which leaves none behind."""

    def __init__(self, settings: LoadSettings, api_key: str | None, size: int):
        self._settings, self._api_key = settings, api_key
        self._selector = selectors.DefaultSelector()
        self._buffers = [b""] * size
        self.processes = [_start_process() for _ in range(size)]
        for number, process in enumerate(self.processes):
            assert process.stdout is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, number)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()  # ends it
        for process in self.processes:
            try:
                process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._selector.close()

    def setup(self) -> int | None:
        """Prepare all processes; return the number of sessions in the load, None without one."""
        for number, process in enumerate(self.processes):
            content = {"settings": to_plain(self._settings), "index": number, "size": len(self.processes)}
            _write(process, "setup", **content, api_key=self._api_key)
        return self.wait_for("ready", SETUP_S)[0]

    def command(self, name: str, **content: Any) -> None:
        """Send a command to all processes."""
        for process in self.processes:
            _write(process, name, **content)

    def wait_for(self, kind: str, timeout_s: float, others: Any = None) -> list[Any]:
        """Wait until every process has sent this message; `others` is called with all other messages."""
        contents: dict[int, Any] = {}
        deadline = monotonic() + timeout_s
        while len(contents) < len(self.processes):
            if monotonic() > deadline:
                raise LaunchError(f"a process of the load generator did not get ready within {timeout_s:g} s")
            for number, message, content in self.messages(0.1):
                if message == kind:
                    contents[number] = content
                elif others is not None:
                    others(message, content)
        return [contents[number] for number in sorted(contents)]

    def messages(self, timeout_s: float) -> Iterator[tuple[int, str, Any]]:
        """Yield the messages that have arrived, with the number of their process, after waiting for one."""
        for key, _ in self._selector.select(timeout_s):
            number = key.data
            data = os.read(key.fd, READ_BYTES)
            if not data:
                code = self.processes[number].wait()
                raise LaunchError(f"a process of the load generator died (exit code {code})")
            buffer = self._buffers[number] + data
            while len(buffer) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(buffer)
                if len(buffer) < LENGTH.size + length:
                    break
                kind, content = pickle.loads(memoryview(buffer)[LENGTH.size : LENGTH.size + length])
                buffer = buffer[LENGTH.size + length :]
                if kind == "error":
                    raise ConfigError(content)
                yield number, kind, content
            self._buffers[number] = buffer


def python_environment() -> dict[str, str]:
    """Return the environment of a child that imports this llmb, wherever it starts."""
    checkout = str(Path(llmb.__file__).parent.parent)
    paths = [checkout, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _start_process() -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "llmb.loadgen.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=python_environment(),
            bufsize=0,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {sys.executable}: {error.strerror}") from error


def _write(process: "subprocess.Popen[bytes]", name: str, **content: Any) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # its end is seen when its messages are read
        view = memoryview(json.dumps({"command": name, **content}).encode() + b"\n")
        while view:
            view = view[process.stdin.write(view) or 0 :]
