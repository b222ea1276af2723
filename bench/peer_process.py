"""A peer in a process of its own with a time limit, so that whatever becomes of it the other figures stand."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def found_by(program: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """What a program beside this file printed as its last line, which is JSON; or why it printed nothing."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {limit_s:.0f} s"}
    try:
        return json.loads(ended.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"it ended with {ended.returncode}: {ended.stderr.strip()[-300:]}"}


def tell(peer: Callable[[argparse.Namespace], dict[str, Any]], options: argparse.Namespace) -> None:
    """The other side of it: print what a peer found, what it lacks, or its error. It should import torch only now."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # less is lost in gaps
    try:
        found = peer(options)
    except ImportError as error:
        found = {"skipped": str(error)}
    except Exception as error:  # the error is the result
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found), flush=True)
