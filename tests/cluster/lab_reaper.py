"""Waits beside the owner of a Slurm lab for its end, however that comes, and then puts down what it left."""

import subprocess
import sys

import lab_registry
from lab_processes import stop_lab


class LabReaper:
    """A process in a session of its own, so that no Ctrl-C reaches it."""

    def __init__(self, port: int):
        command = [sys.executable, __file__, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def __enter__(self) -> "Watchman":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends with the process that holds the other end
    lab_registry.wait_for_end(int(sys.argv[1]))
    lab_registry.sweep(stop_lab)
