"""Waits for the owner of a Slurm lab to exit, in whatever way, and then stops the lab."""

import subprocess
import sys

import lab_registry
from lab_processes import stop_lab


class LabReaper:
    """Process in a separate session, so that Ctrl-C does not reach it."""

    def __init__(self, port: int):
        command = [sys.executable, __file__, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def __enter__(self) -> "LabReaper":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


if __name__ == "__main__":
    sys.stdin.buffer.read()  # returns when the process at the other end exits
    lab_registry.wait_for_end(int(sys.argv[1]))
    lab_registry.sweep(stop_lab)
