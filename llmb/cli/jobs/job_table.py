"""Table of jobs: the filters, the columns, and which columns a narrow terminal drops."""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from llmb.report.terminal.clock_time import format_duration

# Title, value, and drop order where the terminal is too narrow: the highest first, 0 never.
COLUMNS: tuple[tuple[str, Callable[[Any, float], Any], int], ...] = (
    ("job", lambda job, now: job.job_id, 0),
    ("workload", lambda job, now: job.workload, 0),
    ("run", lambda job, now: describe_run(job), 0),
    ("gpu", lambda job, now: job.gpu, 5),
    ("settings", lambda job, now: None, 0),  # filled in last, with as much as fits
    ("started", lambda job, now: datetime.fromtimestamp(job.created_at).strftime("%m-%d %H:%M"), 9),
    ("status", lambda job, now: job.status, 0),
    ("Slurm state", lambda job, now: job.slurm_state, 7),
    ("nodes", lambda job, now: job.nodes, 10),
    ("waited", lambda job, now: format_duration(waited_s(job, now)), 8),
    ("elapsed", lambda job, now: format_duration(elapsed_s(job, now)), 6),
    ("s/step", lambda job, now: job.step_time_s, 1),
    ("tokens/s/gpu", lambda job, now: job.tokens_per_s_per_gpu, 3),
    ("TFLOP/s/gpu", lambda job, now: job.tflops_per_gpu, 11),
    ("MFU %", lambda job, now: None if job.mfu is None else 100 * job.mfu, 6),
    ("out tok/s", lambda job, now: job.output_tokens_per_s, 1),
    ("TTFT ms", lambda job, now: job.ttft_ms, 2),
    ("TPOT ms", lambda job, now: job.tpot_ms, 2),
    ("vs ref", lambda job, now: job.reference_ratio, 4),
)
ONE_RANK_NOTE = "+ one rank of the layout, alone: its step has no communication"
FAULTS_NOTE = "! faults were injected on purpose"
PROXY_NOTE = "* a proxy: a smaller model of the same structure"
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add --status, --workload, --since and --on."""
    add = parser.add_argument
    add("--status", metavar="S[,S...]", help="only these: submitting, pending, running, lost, damaged, ok, failed, ...")
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
    valid = (*GOING, "lost", "damaged", *STATUSES)
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
    """Return one line per job. `width`: of the terminal; the least needed columns are dropped until a line fits.

    Columns without any value are left out.
    """
    from llmb.report.table import render

    def draw() -> str:
        return render(titles, list(zip(*(cells[title] for title in titles), strict=True)), None)

    now = time.time()
    cells = {title: [value(job, now) for job in jobs] for title, value, _ in COLUMNS}
    titles = [title for title in cells if any(cell is not None for cell in cells[title])]
    drop_order = {title: order for title, _, order in COLUMNS}
    settings = distinct_settings(jobs)
    longest = max(len(" ".join(words)) for words in settings)
    text = draw()
    while True:
        free_width, last = _free_width(text, width), max(titles, key=lambda title: drop_order[title])
        if free_width >= _required(longest, drop_order[last]) or drop_order[last] == 0:
            break
        titles.remove(last)
        text = draw()
    if longest and free_width >= _required(longest, 0):
        cells["settings"] = [shorten(words, free_width) or None for words in settings]
        titles = [title for title in cells if title in titles or title == "settings"]
        text = draw()
    notes = [PROXY_NOTE] * any(job.proxy for job in jobs) + [ONE_RANK_NOTE] * any(map(_is_one_rank, jobs))
    notes += [FAULTS_NOTE] * any(map(_has_faults, jobs))
    return "\n".join([text, *([""] if notes else []), *notes])


def _free_width(text: str, width: int | None) -> int:
    """Return the width of one more column beside a table; negative where the table itself is too wide."""
    return sys.maxsize if width is None else width - max(map(len, text.splitlines())) - len("  ")


def _required(longest: int, drop_order: int) -> int:
    """Return the width that settings of this length need at least, if a column of this order could make room."""
    if not longest:
        return -len("  ")  # no further column
    return max(len("settings"), min(longest, 24 if drop_order >= 5 else 0))


def describe_run(job: Any) -> str:
    """Return size, dtype and scale in one word each: "8b fp8 x16"; marked are a proxy (*), one rank (+), faults (!)."""
    words = [job.size, job.dtype, None if job.scale is None else f"x{job.scale}"]  # of a server some are unknown
    marks = "*" * bool(job.proxy) + "+" * _is_one_rank(job) + "!" * _has_faults(job)
    return " ".join(word for word in words if word is not None) + marks


def distinct_settings(jobs: Sequence[Any]) -> list[list[str]]:
    """Return the settings of each job, those that it shares with the fewest of its peers first."""
    counts: Counter[tuple[str, ...]] = Counter()
    for job in jobs:
        counts.update((*_peer_key(job), word) for word in set(_words(job)))
    return [sorted(_words(job), key=lambda word: counts[(*_peer_key(job), word)]) for job in jobs]


def _is_one_rank(job: Any) -> bool:
    from llmb.results.run_settings import ONE_RANK_WORD

    return any(word.startswith(ONE_RANK_WORD) for word in _words(job))


def _has_faults(job: Any) -> bool:
    from llmb.results.run_settings import FAULTS_WORD

    return any(word.startswith(FAULTS_WORD) for word in _words(job))


def _words(job: Any) -> list[str]:
    return (job.settings or "").split()


def _peer_key(job: Any) -> tuple[str, ...]:
    return job.workload, describe_run(job), job.gpu


def shorten(words: Sequence[str], width: int) -> str:
    """Join as many words as fit; `...` stands for the others, or for the end of the first."""
    text, count = " ".join(words), len(words)
    while len(text) > width and count > 1:
        count -= 1
        text = " ".join([*words[:count], "..."])
    return text if len(text) <= width else f"{words[0][: width - 3]}..."


def empty_text(store: Any, options: argparse.Namespace) -> str:
    """Return the line for a table without jobs: none yet, or none that matches the filters."""
    statuses = [job.status for job in store.jobs()]
    if not statuses:
        return "no runs yet; start one: llmb-run submit --help"
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    named = {"workload": options.workload, "since": options.since, "on": options.on}
    others = " ".join(f"--{name} {value}" for name, value in named.items() if value)
    subject = f"no run with {others}" if others else "no run"
    condition = f"is {' or '.join(_split(options.status))}" if options.status else "is stored"
    return f"{subject} {condition}; runs in all: {counts}"


def waited_s(job: Any, now: float) -> float | None:
    """Return the seconds a job waited in Slurm's queue."""
    if job.submitted_at is None:
        return None
    until = job.started_at or job.ended_at or (now if job.status == "pending" else None)
    return None if until is None else max(0.0, until - job.submitted_at)


def elapsed_s(job: Any, now: float) -> float | None:
    """Return the seconds from start to end, or until now; the row of a local run has both times."""
    if job.launcher == "local":
        return max(0.0, (now if job.going else job.updated_at) - job.created_at)  # clocks of two machines differ
    if job.started_at is None:
        return None
    until = job.ended_at or (now if job.going else None)
    return None if until is None else max(0.0, until - job.started_at)


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
