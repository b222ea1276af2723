"""Rows of the job store for runs that other clusters made."""

from typing import Any

from llmb.cli.stored_runs import load_run
from llmb.config.spec import RunConfig
from llmb.launch.archive.run_origin import Origin
from llmb.launch.run_folder import RunDir
from llmb.results.job_store import Job, Store, described, figures

LAUNCHER = "imported"


def imported_row(run: RunDir, origin: Origin) -> Job:
    """What the store holds of an imported run."""
    config, columns = _read(run)
    return described(config, run.path, LAUNCHER, origin.job_id, run.created_at, **columns)


def add_imported(store: Store, run: RunDir, origin: Origin) -> None:
    """Remember an imported run."""
    config, columns = _read(run)
    store.add(config, run.path, LAUNCHER, origin.job_id, created_at=run.created_at, **columns)


def _read(run: RunDir) -> tuple[RunConfig, dict[str, Any]]:
    """Nothing is written to the folder, not even a result that is missing: it stays as it came."""
    config, result = load_run(run)
    told = run.result if run.result.exists() else run.config
    return config, {**figures(result), "updated_at": told.stat().st_mtime}
