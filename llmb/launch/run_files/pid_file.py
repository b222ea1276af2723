"""Process of a local run, recorded in its folder: is the run still alive, and which process stops it?

write_pid_file(run, os.getpid())
is_alive(run) -> True; None on another host
"""

import json
import socket
from typing import Any

from llmb.config.serialization import read_json, write_atomic
from llmb.errors import ConfigError
from llmb.launch.procfs import find_process
from llmb.launch.run_folder import RunFolder


def write_pid_file(run_folder: RunFolder, pid: int) -> None:
    """Record the process that lives as long as the run, with its start time, as pids are reused."""
    process = find_process(pid)
    record = {"pid": pid, "started": process.started if process else None, "host": socket.gethostname()}
    write_atomic(run_folder.pid_file, json.dumps(record) + "\n")


def is_alive(run_folder: RunFolder) -> bool | None:
    """Return whether the run is still running; None: unknown, as it was started on another host."""
    record = _read_pid_file(run_folder)
    if record is None:
        return False
    if record["host"] != socket.gethostname():
        return None
    process = find_process(record["pid"])
    return process is not None and process.started == record["started"]


def live_pid(run_folder: RunFolder) -> int | None:
    """Return the process to signal to stop a run on this host; None where it is not running."""
    record = _read_pid_file(run_folder)
    return record["pid"] if record and is_alive(run_folder) else None


def _read_pid_file(run_folder: RunFolder) -> dict[str, Any] | None:
    try:
        record = read_json(run_folder.pid_file)
    except ConfigError:  # not started yet
        return None
    if not isinstance(record, dict) or not record.keys() >= {"pid", "started", "host"}:
        return None
    return record if type(record["pid"]) is int and record["pid"] > 0 else None
