"""Index of all runs as a page: `llmb-run jobs --html`."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmb.cli.report.page_writer import write_page
from llmb.launch.run_folder import CONFIG_FILE, RunFolder
from llmb.launch.secrets import scrub_thoroughly
from llmb.report.page.jobs_index import jobs_index
from llmb.results.job_store import Job


def write_jobs_page(jobs: Sequence[Job], page: Path) -> Path:
    """Write the index, with a link to each run that has a page; return its path."""
    page = page.absolute()
    write_page(page, jobs_index([(_without_secrets(job), _report(job, page)) for job in jobs]))
    return page


def _without_secrets(job: Job) -> Job:
    """Return the job with its reason scrubbed, which may quote a log."""
    return job if job.reason is None else replace(job, reason=scrub_thoroughly(job.reason))


def _report(job: Job, page: Path) -> str | None:
    folder = Path(job.run_dir)
    if not (folder / CONFIG_FILE).is_file():  # deleted by hand
        return None
    report = RunFolder.open(folder).report_page
    return os.path.relpath(report, page.parent) if report.exists() else None
