"""Job store: one SQLite file under $LLMB_INSTALL with a row per run. Run folders remain the source of truth.

    with Store(path) as store: job = store.add(config, run_dir); store.finish(job, result)

A Slurm job is stored before it is submitted, under an id derived from its run folder, so that a submitter killed
half-way leaves a trace:

    temporary = store.add(config, run_dir, launcher="slurm", status="submitting")
    job = store.submitted(temporary, "4711")        # the id that sbatch printed; or store.refused(temporary, reason)

Many llmb-run processes may write at once: every change is one short transaction and waits for locks. The default
rollback journal is used because a write-ahead log does not work on the network file systems that clusters share.
"""

import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.config.spec import RunConfig
from llmb.errors import ConfigError, LaunchError
from llmb.formats.folder_access import write_hint
from llmb.results.run_settings import run_settings

if TYPE_CHECKING:
    from llmb.results.result import Result

SCHEMA_VERSION = 4
WAIT_S = 30.0
LOCAL_ID = re.compile(r"L([0-9]{1,18})")  # of a local run
GOING = ("submitting", "pending", "running")  # not ended, as far as is known


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row: what was requested, its run folder, and the outcome."""

    job_id: str
    launcher: str
    workload: str
    size: str
    dtype: str | None  # this and the next two: null of a load on a server, unless the user names them
    scale: int | None
    gpu: str | None
    proxy: str | None
    profile: bool
    name: str
    run_dir: str
    created_at: float
    updated_at: float
    status: str  # submitting, pending, running, lost (unknown outcome), damaged (folder), or a status of a Result
    reason: str | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    output_tokens_per_s: float | None = None
    reference_ratio: float | None = None
    slurm_state: str | None = None  # Slurm's state: PENDING, NODE_FAIL, ...
    nodes: str | None = None
    submitted_at: float | None = None  # this and the next three: seconds since 1970
    started_at: float | None = None
    ended_at: float | None = None
    refreshed_at: float | None = None  # when Slurm last reported it
    retry_of: str | None = None  # the job whose configuration this one runs again
    attempt: int = 1
    retries: int = 0  # how often an infrastructure failure may be retried
    ttft_ms: float | None = None  # serving: mean time to first token
    settings: str | None = None  # what tells it apart, see run_settings; null: stored by an older llmb
    tpot_ms: float | None = None  # serving: mean time per output token

    @property
    def slurm_id(self) -> str | None:
        """Slurm's job id, or None for a local run or one not submitted yet."""
        named = self.launcher == "slurm" and self.job_id[0].isdigit()
        return self.job_id.partition("-")[0] if named else None

    @property
    def going(self) -> bool:
        return self.status in GOING


COLUMNS = tuple(f.name for f in fields(Job))
ADDED_COLUMNS = {  # by schema version
    2: COLUMNS[COLUMNS.index("slurm_state") : COLUMNS.index("ttft_ms")],
    3: COLUMNS[COLUMNS.index("ttft_ms") : COLUMNS.index("tpot_ms")],
    4: COLUMNS[COLUMNS.index("tpot_ms") :],
}
FIGURES = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "output_tokens_per_s")


class Store:
    """The store, created if missing; use as a context manager."""

    def __init__(self, path: Path):
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():  # SQLite would keep a group out
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
            self._db = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
            if self._version() != SCHEMA_VERSION:
                self._make_tables()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; {write_hint(path)}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> LaunchError:
        return LaunchError(
            f"the job store {self._path} cannot be used ({error}); move it away and run: llmb-run jobs rebuild"
        )

    def _unwritable(self, error: sqlite3.OperationalError) -> LaunchError:
        hint = f"; {write_hint(self._path)}" if "readonly" in str(error) else ""
        return LaunchError(f"the job store cannot be written: {error}{hint}")

    def _version(self) -> int | None:
        has_table = self._db.execute("SELECT name FROM sqlite_master WHERE name = 'metadata'").fetchone()
        row = self._db.execute("SELECT schema_version FROM metadata").fetchone() if has_table else None
        version = row[0] if row else None
        if version is not None and (type(version) is not int or version < 1):
            raise sqlite3.DatabaseError(f"its schema version is {str(version)[:20]!r}")
        return version

    def _make_tables(self) -> None:
        """Create or migrate the tables in one transaction, so that only one of many openers migrates."""
        with self._transaction():
            version = self._version()
            if version is not None and version > SCHEMA_VERSION:
                raise ConfigError(
                    f"the job store has schema {version}, this llmb reads up to {SCHEMA_VERSION}; use a newer llmb"
                )
            self._db.execute("CREATE TABLE IF NOT EXISTS metadata (schema_version INTEGER)")
            self._db.execute(f"CREATE TABLE IF NOT EXISTS jobs ({', '.join(COLUMNS)}, PRIMARY KEY (job_id))")
            for newer in range(version + 1, SCHEMA_VERSION + 1) if version is not None else ():
                for column in ADDED_COLUMNS[newer]:
                    self._db.execute(f"ALTER TABLE jobs ADD COLUMN {column}")
            if version == 1:
                self._db.execute("UPDATE jobs SET attempt = 1, retries = 0")
            for column in ("created_at", "status", "retry_of"):
                self._db.execute(f"CREATE INDEX IF NOT EXISTS jobs_by_{column} ON jobs ({column})")
            self._db.execute("DELETE FROM metadata")
            self._db.execute("INSERT INTO metadata VALUES (?)", (SCHEMA_VERSION,))

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    @contextmanager
    def many(self) -> Iterator[None]:
        """Group all changes inside into one transaction: fast for hundreds. Others wait, so do nothing slow in it."""
        with self._transaction():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._db.in_transaction:  # inside many()
            yield
            return
        self._execute_or_say("BEGIN IMMEDIATE")
        try:
            yield
            self._execute_or_say("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                with suppress(sqlite3.DatabaseError):  # of a damaged file; it is not written to either way
                    self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):  # the disk is full, or a lock was held too long
                raise self._unwritable(error) from error
            if isinstance(error, (sqlite3.DatabaseError, UnicodeDecodeError)):
                raise self._damaged(error) from error
            raise

    def _execute_or_say(self, statement: str) -> None:
        try:
            self._db.execute(statement)
        except sqlite3.OperationalError as error:
            raise self._unwritable(error) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error

    def add(
        self,
        config: RunConfig,
        run_dir: Path,
        launcher: str = "local",
        job_id: str | None = None,
        *,
        status: str = "running",
        created_at: float | None = None,
        **columns: Any,
    ) -> str:
        """Add a run that starts now and return its job id: L1, L2, ... or, for Slurm, a temporary one.

        `columns`: more of the row, such as retry_of, attempt, retries.
        """
        with self._transaction():
            if job_id is None:
                job_id = temporary_id(run_dir) if launcher == "slurm" else f"L{self._last_local() + 1}"
            self._put(job_row(config, run_dir, launcher, job_id, created_at or time.time(), status=status, **columns))
        return job_id

    def put(self, job: Job) -> None:
        """Add a complete row, or replace the one with its id."""
        with self._transaction():
            self._put(job)

    def submitted(self, temporary: str, job_id: str) -> str:
        """Record that Slurm accepted the job; return the row's id: Slurm's, or 17-2 where 17 is taken."""
        now = time.time()
        with self._transaction():
            rows = [job.job_id for job in self._with_slurm_id(job_id) if temporary_id(Path(job.run_dir)) == temporary]
            if rows:  # another process recovered this submission first
                return rows[0]
            final = self.free_id(job_id)
            state = {"status": "pending", "slurm_state": "PENDING", "reason": None}
            self._set(temporary, {"job_id": final, "submitted_at": now, "updated_at": now, **state})
        return final

    def refused(self, temporary: str, reason: str) -> None:
        """Record that Slurm rejected the job."""
        self.note(temporary, status="failed", reason=reason)

    def free_id(self, job_id: str) -> str:
        """Return this id, or one derived from it that no row has."""
        taken = {job.job_id for job in self._with_slurm_id(job_id)}
        names = (f"{job_id}-{number}" if number > 1 else job_id for number in count(1))
        return next(name for name in names if name not in taken)

    def _with_slurm_id(self, slurm_id: str) -> list[Job]:
        """Return jobs with this Slurm id: several where ids were reset or clusters share the store."""
        id_prefix = "job_id > ? AND job_id < ?"  # as LIKE, which would look at every row
        return self._select(f" WHERE job_id = ? OR ({id_prefix})", (slurm_id, f"{slurm_id}-", f"{slurm_id}."))

    def note(self, job_id: str, /, **columns: Any) -> None:
        """Update columns of a job."""
        with self._transaction():
            self._set(job_id, {"updated_at": time.time(), **columns})

    def move_on(self, job: Job, **columns: Any) -> None:
        """Update columns of a job, unless its status has changed since it was read."""
        with self._transaction():
            now = self.now(job)
            if now.status == job.status:
                self._set(now.job_id, {"updated_at": time.time(), **columns})

    def now(self, job: Job) -> Job:
        """Return the job as stored now; another process may have renamed or removed it."""
        same_id = self._select(" WHERE job_id = ? AND run_dir = ?", (job.job_id, job.run_dir))
        rows = same_id or self._select(" WHERE run_dir = ?", (job.run_dir,))
        return rows[0] if rows else job

    def finish(self, job_id: str, result: "Result", **columns: Any) -> None:
        """Store the outcome of a run; `columns`: more of the row."""
        self.note(job_id, **figures(result), **columns)

    def replace_all(self, jobs: Iterable[Job], known_run_dirs: Set[str]) -> None:
        """Replace all rows by these, as read from run folders; `known_run_dirs`: those with a row before the scan.

        Rows added during the scan are newer and stay. They are told apart by folder, not by time: another rebuild
        may have entered them with their folder's time, in whole seconds.
        """
        with self._transaction():
            rows = self._select("", ())
            old = [(job.job_id,) for job in rows if job.run_dir in known_run_dirs]
            self._db.executemany("DELETE FROM jobs WHERE job_id = ?", old)
            newer = {job.run_dir for job in rows} - known_run_dirs
            last = self._last_local()
            for job in jobs:
                if job.run_dir not in newer:
                    job_id = self.free_id(job.job_id) if job.job_id else f"L{last + 1}"
                    self._put(replace(job, job_id=job_id))
                    last = max(last, int(number[1]) if (number := LOCAL_ID.match(job_id)) else 0)

    def jobs_to_retry(self) -> list[Job]:
        """Return ended jobs with retries left; settling a job sets its retries to 0 where a retry is pointless."""
        marks = ", ".join("?" * len(GOING))
        return self._select(
            f" WHERE retries > 0 AND status NOT IN ('ok', 'lost', 'damaged', {marks}) ORDER BY created_at", GOING
        )

    def take_retries(self, job_id: str) -> int:
        """Take the retries a job has left, so that of several watchers only one retries it."""
        with self._transaction():
            left = self.job(job_id).retries
            self._set(job_id, {"retries": 0})
        return left

    def jobs(
        self,
        limit: int | None = None,
        *,
        statuses: Sequence[str] = (),
        workloads: Sequence[str] = (),
        launcher: str | None = None,
        since: float | None = None,
    ) -> list[Job]:
        """Return all matching jobs, oldest first; with a limit the newest ones."""
        tests: list[tuple[str, Sequence[Any]]] = []
        for column, values in (("status", statuses), ("workload", workloads)):
            if values:
                tests.append((f"{column} IN ({', '.join('?' * len(values))})", values))
        if launcher:
            tests.append(("launcher = ?", [launcher]))
        if since is not None:
            tests.append(("created_at >= ?", [since]))
        where = " WHERE " + " AND ".join(test for test, _ in tests) if tests else ""
        return self._select(
            where + " ORDER BY created_at DESC, rowid DESC" + (f" LIMIT {min(limit, sys.maxsize)}" if limit else ""),
            [value for _, values in tests for value in values],
        )[::-1]

    def job(self, job_id: str) -> Job:
        """Return one job by its id, or raise with the newest ids."""
        rows = self._select(" WHERE job_id = ?", (job_id,))
        if not rows:
            newest = ", ".join(j.job_id for j in self.jobs(limit=5)) or "none yet"
            raise ConfigError(f"no job {job_id!r}; the newest are: {newest}")
        return rows[0]

    def retries_of(self, job_id: str) -> list[Job]:
        """Return the retries of a job."""
        return self._select(" WHERE retry_of = ? ORDER BY created_at", (job_id,))

    def _select(self, clause: str, values: Sequence[Any]) -> list[Job]:
        try:
            rows = self._db.execute(f"SELECT {', '.join(COLUMNS)} FROM jobs{clause}", tuple(values)).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError) as error:
            if type(error) is sqlite3.OperationalError and "locked" in str(error):
                raise LaunchError(f"the job store cannot be read: {error}") from error
            raise self._damaged(error) from error
        return [Job(**dict(zip(COLUMNS, row, strict=True))) for row in rows]

    def _last_local(self) -> int:
        """Return the highest number of a local run; 0: there is none."""
        number = "CAST(substr(job_id, 2) AS INTEGER)"
        taken = self._db.execute(f"SELECT max({number}) FROM jobs WHERE job_id >= 'L' AND job_id < 'M'")
        return int(taken.fetchone()[0] or 0)

    def _put(self, job: Job) -> None:
        marks = ", ".join("?" * len(COLUMNS))
        self._db.execute(f"INSERT OR REPLACE INTO jobs ({', '.join(COLUMNS)}) VALUES ({marks})", row_values(job))

    def _set(self, job_id: str, values: dict[str, Any]) -> None:
        assignments = ", ".join(f"{column} = ?" for column in values)
        self._db.execute(f"UPDATE jobs SET {assignments} WHERE job_id = ?", (*map(_storable, values.values()), job_id))


def row_values(job: Job) -> tuple[Any, ...]:
    """Return the values of a row as SQLite takes them; raise ConfigError if it cannot."""
    return tuple(_storable(getattr(job, column)) for column in COLUMNS)


def _storable(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{value:.6g} is larger than any count")
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value  # bytes of paths


def temporary_id(run_dir: Path) -> str:
    """Return the id of a Slurm job before submission."""
    return folder_id(run_dir, "S")


def folder_id(run_dir: Path, prefix: str) -> str:
    """Return an id derived from a run folder."""
    return f"{prefix}{sha256(str(run_dir).encode(errors='surrogateescape')).hexdigest()[:10]}"


def job_row(config: RunConfig, run_dir: Path, launcher: str, job_id: str, created_at: float, **columns: Any) -> Job:
    """Return the row of a run; `columns`: its status and more."""
    return Job(
        job_id=job_id, launcher=launcher, workload=config.target, size=config.size, dtype=config.precision.dtype,
        scale=config.machine.gpus, gpu=config.machine.gpu, proxy=config.proxy, profile=config.profile.profile,
        name=config.name, run_dir=str(run_dir), created_at=created_at, settings=run_settings(config),
        **{"updated_at": created_at, **columns},
    )  # fmt: skip


def figures(result: "Result") -> dict[str, Any]:
    """Return the columns of a row that come from a Result."""
    return {
        "status": result.status,
        "reason": result.reason,
        "step_time_s": result.step_time_s.median if result.step_time_s else None,
        **{name: getattr(result, name) for name in FIGURES},
        "ttft_ms": (result.ttft_ms or {}).get("mean"),  # other engines may print percentiles only
        "tpot_ms": (result.tpot_ms or {}).get("mean"),
        "reference_ratio": result.reference.ratio if result.reference else None,
    }
