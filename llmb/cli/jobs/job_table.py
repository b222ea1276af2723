"""Table of jobs: the filters, the columns, and which columns a narrow terminal drops."""

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

# Title, value, and drop order where the terminal is too narrow: the highest first, 0 never.
COLUMNS: tuple[tuple[str, Callable[[Any, float], Any], int], ...] = (
    ("job", lambda job, now: job.job_id, 0),
    ("workload", lambda job, now: job.workload, 0),
    ("size", lambda job, now: job.size, 0),
    ("dtype", lambda job, now: job.dtype, 0),
    ("scale", lambda job, now: job.scale, 0),
    ("gpu", lambda job, now: job.gpu, 4),
    ("proxy", lambda job, now: bool(job.proxy), 2),
    ("started", lambda job, now: datetime.fromtimestamp(job.created_at).strftime("%m-%d %H:%M"), 9),
    ("status", lambda job, now: job.status, 0),
    ("Slurm state", lambda job, now: job.slurm_state, 7),
    ("nodes", lambda job, now: job.nodes, 10),
    ("waited", lambda job, now: format_duration(waited_s(job, now)), 8),
    ("elapsed", lambda job, now: format_duration(elapsed_s(job, now)), 6),
    ("s/step", lambda job, now: job.step_time_s, 1),
    ("tokens/s/gpu", lambda job, now: job.tokens_per_s_per_gpu, 3),
    ("TFLOP/s/gpu", lambda job, now: job.tflops_per_gpu, 11),
    ("MFU %", lambda job, now: None if job.mfu is None else 100 * job.mfu, 5),
    ("vs ref", lambda job, now: job.reference_ratio, 3),
)
ONLY_SLURM = ("Slurm state", "nodes", "waited")
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add --status, --workload, --since and --on."""
    add = parser.add_argument
    add("--status", metavar="S[,S...]", help="only these: submitting, pending, running, lost, ok, failed, ...")
    add("-w", "--workload", metavar="W[,W...]", help="only these workloads")
    add("--since", metavar="WHEN", help="only those created since: 2h, 3d, 2026-01-31, '2026-01-31 14:00'")
    add("--on", choices=("local", "slurm", "imported"), help="only local runs, Slurm jobs, or imported runs")


def is_filtered(options: argparse.Namespace) -> bool:
    """Return whether any filter is set."""
    return any((options.status, options.workload, options.since, options.on))


def filters(options: argparse.Namespace) -> dict[str, Any]:
    """Return the filters as arguments of Store.jobs."""
    from llmb.config.spec import STATUSES
    from llmb.errors import UnknownName
    from llmb.results.job_store import GOING

    statuses = _split(options.status)
    valid = (*GOING, "lost", *STATUSES)
    for status in statuses:
        if status not in valid:
            raise UnknownName("status", status, valid)
    return {
        "statuses": statuses,
        "workloads": _split(options.workload),
        "launcher": options.on,
        "since": parse_since(options.since) if options.since else None,
    }


def table(jobs: Sequence[Any], width: int | None = None) -> str:
    """Return one line per job. `width`: of the terminal; the least needed columns are dropped until a line fits."""
    from llmb.report.table import render

    if not jobs:
        return "no runs yet; start one: llmb-run submit --help"
    now = time.time()
    columns = [column for column in COLUMNS if column[0] not in ONLY_SLURM or any(j.launcher == "slurm" for j in jobs)]
    cells = {title: [value(job, now) for job in jobs] for title, value, _ in columns}
    titles = [title for title, _, _ in columns]
    while True:
        text = render(titles, list(zip(*(cells[title] for title in titles), strict=True)))
        drop_order, title = max((order, title) for title, _, order in columns if title in titles)
        if width is None or drop_order == 0 or max(map(len, text.splitlines())) <= width:
            return text
        titles.remove(title)


def terminal_width() -> int | None:
    """Return the width of the terminal; None: stdout is not one."""
    from shutil import get_terminal_size  # slow to import, and every command declares its options here

    return get_terminal_size().columns if sys.stdout.isatty() else None


def waited_s(job: Any, now: float) -> float | None:
    """Return the seconds a job waited in Slurm's queue."""
    if job.submitted_at is None:
        return None
    until = job.started_at or job.ended_at or (now if job.status == "pending" else None)
    return None if until is None else max(0.0, until - job.submitted_at)


def elapsed_s(job: Any, now: float) -> float | None:
    """Return the seconds from start to end, or until now; the row of a local run has both times."""
    if job.launcher == "local":
        return (now if job.going else job.updated_at) - job.created_at
    if job.started_at is None:
        return None
    until = job.ended_at or (now if job.going else None)
    return None if until is None else max(0.0, until - job.started_at)


def format_duration(seconds: float | None) -> str | None:
    """Format a duration as Slurm does: 0:07, 1:02:03 or 2-03:04:05."""
    if seconds is None:
        return None
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{whole_seconds:02}"
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def parse_since(text: str) -> float:
    """Return the Unix time of a date, or of a duration before now."""
    from llmb.errors import ConfigError

    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if ago:
        return time.time() - float(ago[1]) * UNIT_S[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ConfigError(
            f"--since {text!r} is not a time; write 90m, 2h, 3d, 2026-01-31 or '2026-01-31 14:00'"
        ) from error
