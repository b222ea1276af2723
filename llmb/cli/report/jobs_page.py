"""Index of all runs as a page: `llmb-run jobs --html`."""

import os
from collections.abc import Sequence
from pathlib import Path

from llmb.launch.run_folder import CONFIG_FILE, RunFolder, write_error
from llmb.report.page.jobs_index import jobs_index
from llmb.results.job_store import Job


def write_jobs_page(jobs: Sequence[Job], page: Path) -> Path:
    """Write the index, with a link to each run that has a page; return its path."""
    from llmb.config.serialization import write_atomic

    page = page.absolute()
    try:
        write_atomic(page, jobs_index([(job, _report(job, page)) for job in jobs]))
    except OSError as error:
        raise write_error(page, error) from error
    return page


def _report(job: Job, page: Path) -> str | None:
    folder = Path(job.run_dir)
    if not (folder / CONFIG_FILE).is_file():  # deleted by hand
        return None
    report = RunFolder.open(folder).report_page
    return os.path.relpath(report, page.parent) if report.exists() else None
