"""`llmb-run jobs --watch`: the table as it changes, until nothing runs any more.

On a terminal the table is drawn anew in its place; elsewhere each change is one line. Slurm is asked rarely while
nothing changes. Ctrl-C leaves, and touches no job.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence

from llmb.cli.jobs.auto_retry import retry_failed
from llmb.cli.jobs.job_table import filters, room, table
from llmb.cli.jobs.polling import Poller, say_aside
from llmb.launch.slurm.backoff import Backoff
from llmb.report.table import number
from llmb.results.job_store import GOING, Job, Store

NOTES = 3  # lines below the table


def watch(store: Store, options: argparse.Namespace) -> int:
    """Until every job that may be shown has ended, or Ctrl-C."""
    view = _Screen() if sys.stdout.isatty() else _Lines()
    poller = Poller(store, view.say)
    backoff = Backoff()
    try:
        while True:
            poller.refresh(_going(store, options))
            retry_failed(store, view.say)
            jobs = store.jobs(options.limit, **filters(options))
            view.show(jobs)
            if not _going(store, options) and not store.to_be_tried_again():
                return 0
            time.sleep(backoff.after([(job.job_id, job.status) for job in jobs]))
    except KeyboardInterrupt:
        return 0
    finally:
        view.close()


def _going(store: Store, options: argparse.Namespace) -> list[Job]:
    """Those that may yet come to have the status that is asked for."""
    return store.jobs(**{**filters(options), "statuses": GOING})


class _Screen:
    """Draws over what it drew last."""

    def __init__(self) -> None:
        self._lines = 0
        self._notes: list[str] = []

    def say(self, text: str) -> None:
        """Below the table, as long as there is nothing newer."""
        width = shutil.get_terminal_size().columns
        self._notes = [*self._notes, f"{time.strftime('%H:%M:%S')} {' '.join(text.split())}"[:width]][-NOTES:]

    def show(self, jobs: Sequence[Job]) -> None:
        height = max(1, shutil.get_terminal_size().lines - 5 - len(self._notes))
        lines = [f"{_counted(jobs)}, {time.strftime('%H:%M:%S')}", "", table(jobs[-height:], room()), *self._notes, ""]
        text = "\n".join(lines)
        back = f"\x1b[{self._lines}A" if self._lines else ""
        print(f"{back}\r\x1b[J{text}", end="", flush=True)
        self._lines = text.count("\n")

    def close(self) -> None:
        """What was drawn last stays."""


class _Lines:
    """One line for each job that is not as it was; the table in the end."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._jobs: Sequence[Job] = ()

    def say(self, text: str) -> None:
        say_aside(text)

    def show(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            now = _described(job)
            if self._known.get(job.job_id) != now:
                print(f"{time.strftime('%H:%M:%S')} {job.job_id} {now}", flush=True)
            self._known[job.job_id] = now
        self._jobs = jobs

    def close(self) -> None:
        print(f"\n{table(self._jobs, room())}", flush=True)


def _described(job: Job) -> str:
    said = [job.status]
    if job.nodes and job.going:
        said.append(f"on {job.nodes}")
    if job.reason:
        said.append(f"({job.reason})")
    if job.tokens_per_s_per_gpu is not None:
        said.append(f"{number(job.tokens_per_s_per_gpu)} tokens/s/gpu")
    if job.mfu is not None:
        said.append(f"MFU {number(100 * job.mfu)} %")
    if job.reference_ratio is not None:
        said.append(f"{number(job.reference_ratio)} x of the reference")
    return f"{job.workload} {job.size} {job.dtype} x{job.scale}: " + " ".join(" ".join(said).split())


def _counted(jobs: Sequence[Job]) -> str:
    statuses = [job.status for job in jobs]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "no jobs"
