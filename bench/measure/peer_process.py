"""A peer in a process of its own with a time limit, so that whatever becomes of it the other figures stand.

waiting = PeerProcess("train_peer.py", [..., "--wait"])     # imports what it needs, and touches no GPU
result = waiting.result(limit_s=90)                         # now it begins
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from subprocess import PIPE
from typing import Any


class PeerProcess:
    """A program of bench/ that runs, or waits on its standard input for a line to begin."""

    def __init__(self, program: str, arguments: Sequence[str]):
        command = [sys.executable, str(Path(__file__).parents[1] / program), *arguments]
        self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)

    def result(self, limit_s: float) -> dict[str, Any]:
        """Return the JSON of its last line, or why there is none."""
        try:
            out, err = self._process.communicate("begin\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {"error": f"no result within {limit_s:.0f} s"}
        try:
            return json.loads(out.strip().splitlines()[-1])
        except (IndexError, ValueError):
            return {"error": f"it ended with {self._process.returncode}: {err.strip()[-300:]}"}


def run_peer(program: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a program and return its result."""
    return PeerProcess(program, arguments).result(limit_s)


def describe_result(result: dict[str, Any]) -> str:
    """Return what ran, or why nothing did, in a few words."""
    if "skipped" in result:
        return f"not here: {result['skipped']}"
    return result.get("error") or "{version}, {how}, {gbs} sequences a step, {mbs} at once".format(**result)


def print_result(
    peer: Callable[[argparse.Namespace], dict[str, Any]],
    options: argparse.Namespace,
    imports: Sequence[str] = (),
    wait: bool = False,
) -> None:
    """In the peer's process: print its result, what is not installed, or its error. Import torch only now.

    `imports`: modules that take long. One that waits begins when a line comes, and ends with whoever started it.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # less is lost in gaps
    try:
        for name in imports:
            import_module(name)
        if wait and not sys.stdin.readline():
            return
        result = peer(options)
    except ImportError as error:
        result = {"skipped": str(error)}
    except Exception as error:  # the error is the result
        result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(result), flush=True)
