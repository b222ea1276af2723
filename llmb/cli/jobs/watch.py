"""`llmb-run jobs --watch`: the table of jobs, updated until none is active.

On a terminal the table is redrawn in place; elsewhere each change prints one line. Slurm is polled less often while
nothing changes. Ctrl-C stops watching and does not touch any job.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence

from llmb.cli.jobs.auto_retry import own_jobs_to_retry, retry_failed
from llmb.cli.jobs.job_table import describe_run, empty_text, filters, table
from llmb.cli.jobs.polling import Poller, print_to_stderr
from llmb.launch.slurm.backoff import Backoff
from llmb.report.table import number, terminal_width
from llmb.report.terminal.colour import coloured
from llmb.report.terminal.safe_stream import without_controls, write_own
from llmb.results.job_store import GOING, Job, Store

NOTES = 3  # lines below the table


def watch(store: Store, options: argparse.Namespace) -> int:
    """Refresh and show the selected jobs until all have ended, or Ctrl-C."""

    def draw(jobs: Sequence[Job]) -> str:
        return coloured(table(jobs, terminal_width()) if jobs else empty_text(store, options), sys.stdout)

    view = _Screen(draw) if sys.stdout.isatty() else _Lines(draw)
    poller = Poller(store, view.log)
    backoff = Backoff()
    try:
        while True:
            poller.refresh(_active(store, options))
            retry_failed(store, view.log)
            jobs = poller.with_unsaved(store.jobs(options.limit, **filters(options)))
            view.show(jobs)
            if not any(job.going for job in poller.with_unsaved(_active(store, options))) and not own_jobs_to_retry(
                store
            ):
                return 0
            time.sleep(backoff.next_delay_s([(job.job_id, job.status) for job in jobs]))
    except KeyboardInterrupt:
        return 0
    finally:
        view.close()


def _active(store: Store, options: argparse.Namespace) -> list[Job]:
    """Return the active jobs, which may still get a status that --status selects."""
    return store.jobs(**{**filters(options), "statuses": GOING})


class _Screen:
    """View that redraws the table in place."""

    def __init__(self, draw: Callable[[Sequence[Job]], str]) -> None:
        self._draw = draw
        self._lines = 0
        self._notes: list[str] = []

    def log(self, text: str) -> None:
        """Show a note below the table until newer ones replace it."""
        width = shutil.get_terminal_size().columns
        note = f"{time.strftime('%H:%M:%S')} {without_controls(' '.join(text.split()))}"
        self._notes = [*self._notes, note[:width]][-NOTES:]

    def show(self, jobs: Sequence[Job]) -> None:
        height = max(1, shutil.get_terminal_size().lines - 7 - len(self._notes))
        title = f"{without_controls(_status_counts(jobs))}, {time.strftime('%H:%M:%S')}"
        text = "\n".join([title, "", self._draw(jobs[-height:]), *self._notes, ""])
        cursor_up = f"\x1b[{self._lines}A" if self._lines else ""
        write_own(sys.stdout, f"{cursor_up}\r\x1b[J{text}")
        self._lines = text.count("\n")

    def close(self) -> None:
        """Leave the last table on the screen."""


class _Lines:
    """View that prints one line for each change of a job, and the table at the end."""

    def __init__(self, draw: Callable[[Sequence[Job]], str]) -> None:
        self._draw = draw
        self._descriptions: dict[str, str] = {}
        self._jobs: Sequence[Job] = ()

    def log(self, text: str) -> None:
        print_to_stderr(text)

    def show(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            description = _describe(job)
            if self._descriptions.get(job.job_id) != description:
                print(f"{time.strftime('%H:%M:%S')} {job.job_id} {description}", flush=True)
            self._descriptions[job.job_id] = description
        self._jobs = jobs

    def close(self) -> None:
        print(f"\n{self._draw(self._jobs)}", flush=True)


def _describe(job: Job) -> str:
    facts = [job.status]
    if job.nodes and job.going:
        facts.append(f"on {job.nodes}")
    if job.reason:
        facts.append(f"({job.reason})")
    if job.tokens_per_s_per_gpu is not None:
        facts.append(f"{number(job.tokens_per_s_per_gpu)} tokens/s/gpu")
    if job.output_tokens_per_s is not None:
        facts.append(f"{number(job.output_tokens_per_s)} output tokens/s")
    if job.mfu is not None:
        facts.append(f"MFU {number(100 * job.mfu)} %")
    if job.reference_ratio is not None:
        facts.append(f"{number(job.reference_ratio)} x of the reference")
    return f"{job.workload} {describe_run(job)}: " + " ".join(" ".join(facts).split())


def _status_counts(jobs: Sequence[Job]) -> str:
    statuses = [job.status for job in jobs]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "no jobs"
