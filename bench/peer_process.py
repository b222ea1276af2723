"""A peer in a process of its own with a time limit, so that whatever becomes of it the other figures stand."""

import json
import subprocess
import sys
from collections.abc import Sequence
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
