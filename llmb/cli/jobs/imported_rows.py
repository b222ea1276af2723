"""Rows of the job store for runs imported from other clusters."""

from typing import Any

from llmb.cli.stored_runs import load_run
from llmb.config.spec import RunConfig
from llmb.launch.archive.run_origin import Origin
from llmb.launch.run_folder import RunFolder
from llmb.results.job_store import Job, Store, figures, job_row

LAUNCHER = "imported"


def imported_row(run: RunFolder, origin: Origin) -> Job:
    """Return the row of an imported run."""
    config, columns = _read(run)
    return job_row(config, run.path, LAUNCHER, origin.job_id, run.created_at, **columns)


def add_imported(store: Store, run: RunFolder, origin: Origin) -> None:
    """Add an imported run to the store."""
    config, columns = _read(run)
    store.add(config, run.path, LAUNCHER, origin.job_id, created_at=run.created_at, **columns)
    run.add_short_path(origin.job_id)


def _read(run: RunFolder) -> tuple[RunConfig, dict[str, Any]]:
    """Read the run without writing to its folder, not even a missing result: it stays as imported."""
    config, result = load_run(run)
    source = run.result if run.result.exists() else run.config
    return config, {**figures(result), "updated_at": source.stat().st_mtime}
