"""The job store: one SQLite file under $LLMB_INSTALL that remembers every run. Run folders stay the truth.

    with Store(path) as store: job = store.add(config, run_dir); store.finish(job, result)

Many llmb-run processes may write at once: every change is one short transaction, and SQLite waits its turn. The default
journal is kept because a write-ahead log does not work on the network file systems that clusters share.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmb.errors import ConfigError, LaunchError
from llmb.results.result import Result
from llmb.spec import RunConfig

SCHEMA_VERSION = 1
WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row: what was asked, where it lies, how it went."""

    job_id: str
    launcher: str
    workload: str
    size: str
    dtype: str
    scale: int
    gpu: str
    proxy: str | None
    profile: bool
    name: str
    run_dir: str
    created_at: float
    updated_at: float
    status: str  # running, or a status of a Result
    reason: str | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    output_tokens_per_s: float | None = None
    reference_ratio: float | None = None


COLUMNS = tuple(f.name for f in fields(Job))
FIGURES = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "output_tokens_per_s")


class Store:
    """Opens (and makes) the store; use as a context manager."""

    def __init__(self, path: Path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
            self._make_tables()
        except OSError as error:
            raise ConfigError(
                f"cannot write {path.parent}: {error.strerror}; set LLMB_INSTALL to a folder you may write"
            ) from error
        except sqlite3.DatabaseError as error:
            raise LaunchError(
                f"the job store {path} cannot be used ({error}); move it away and run: llmb-run jobs rebuild"
            ) from error

    def _make_tables(self) -> None:
        with self._transaction():
            self._db.execute("CREATE TABLE IF NOT EXISTS metadata (schema_version INTEGER)")
            self._db.execute(f"CREATE TABLE IF NOT EXISTS jobs ({', '.join(COLUMNS)}, PRIMARY KEY (job_id))")
            row = self._db.execute("SELECT schema_version FROM metadata").fetchone()
            if row is None:
                self._db.execute("INSERT INTO metadata VALUES (?)", (SCHEMA_VERSION,))
            elif row[0] != SCHEMA_VERSION:
                raise ConfigError(f"the job store has schema {row[0]}, this llmb reads {SCHEMA_VERSION}")

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise LaunchError(f"the job store cannot be written: {error}") from error
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        try:
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise LaunchError(f"the job store cannot be written: {error}") from error

    def add(self, config: RunConfig, run_dir: Path, launcher: str = "local", job_id: str | None = None) -> str:
        """Remember a run that starts now; gives its job id (L1, L2, ... for local runs)."""
        now = time.time()
        with self._transaction():
            if job_id is None:
                taken = self._db.execute(
                    "SELECT max(CAST(substr(job_id, 2) AS INTEGER)) FROM jobs WHERE job_id LIKE 'L%'"
                )
                job_id = f"L{(taken.fetchone()[0] or 0) + 1}"
            self._put(_job(config, run_dir, launcher, job_id, now))
        return job_id

    def restore(self, config: RunConfig, run_dir: Path, job_id: str, result: Result, created_at: float) -> None:
        """Remember a run found on disk."""
        with self._transaction():
            self._put(_job(config, run_dir, "local", job_id, created_at))
            self._set(job_id, _figures(result))

    def finish(self, job_id: str, result: Result) -> None:
        """Keep how a run went."""
        with self._transaction():
            self._set(job_id, _figures(result))

    def clear(self) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM jobs")

    def jobs(self, limit: int | None = None) -> list[Job]:
        """All jobs, oldest first; with a limit the newest ones."""
        query = f"SELECT {', '.join(COLUMNS)} FROM jobs ORDER BY created_at DESC, rowid DESC"
        rows = self._db.execute(query + (f" LIMIT {int(limit)}" if limit else "")).fetchall()
        return [Job(**dict(zip(COLUMNS, row, strict=True))) for row in reversed(rows)]

    def job(self, job_id: str) -> Job:
        """One job by its id, or a line with the newest ids there are."""
        query = f"SELECT {', '.join(COLUMNS)} FROM jobs WHERE job_id = ?"
        row = self._db.execute(query, (job_id,)).fetchone()
        if row is None:
            newest = ", ".join(j.job_id for j in self.jobs(limit=5)) or "none yet"
            raise ConfigError(f"no job {job_id!r}; the newest are: {newest}")
        return Job(**dict(zip(COLUMNS, row, strict=True)))

    def _put(self, job: Job) -> None:
        marks = ", ".join("?" * len(COLUMNS))
        self._db.execute(
            f"INSERT OR REPLACE INTO jobs VALUES ({marks})", tuple(getattr(job, column) for column in COLUMNS)
        )

    def _set(self, job_id: str, values: dict[str, Any]) -> None:
        assignments = ", ".join(f"{column} = ?" for column in values)
        self._db.execute(f"UPDATE jobs SET {assignments} WHERE job_id = ?", (*values.values(), job_id))


def _job(config: RunConfig, run_dir: Path, launcher: str, job_id: str, now: float) -> Job:
    return Job(
        job_id=job_id, launcher=launcher, workload=config.target, size=config.size, dtype=config.precision.dtype,
        scale=config.machine.gpus, gpu=config.machine.gpu, proxy=config.proxy, profile=config.profile.profile,
        name=config.name, run_dir=str(run_dir), created_at=now, updated_at=now, status="running",
    )  # fmt: skip


def _figures(result: Result) -> dict[str, Any]:
    return {
        "updated_at": time.time(),
        "status": result.status,
        "reason": result.reason,
        "step_time_s": result.step_time_s.median if result.step_time_s else None,
        **{name: getattr(result, name) for name in FIGURES},
        "reference_ratio": result.reference.ratio if result.reference else None,
    }
