"""Import runs of another cluster into this installation.

    import_archive(Path("runs.tar.zst"), install) -> ImportResult(new=[...], existing=[...])

An archive is unpacked to a staging folder and verified; only then is each run folder, marked with its origin, renamed
to its final path. A run that exists already is left as it is, so importing twice changes nothing; another run of
the same name and second gets the next free folder.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

from llmb.errors import ConfigError, LlmbError
from llmb.launch.archive.manifest import ArchivedRun
from llmb.launch.archive.run_origin import (
    UNKNOWN_CLUSTER,
    Origin,
    read_origin,
    run_identity,
    sanitize_cluster_name,
    write_origin,
)
from llmb.launch.archive.unpack import ByteProgress, read_archive
from llmb.launch.run_folder import RunFolder, make_folder, store_path, write_error
from llmb.launch.run_lock import file_lock

STAGING_PREFIX = "import-"


@dataclass(frozen=True)
class ImportResult:
    """Run folders that were imported, and those that existed before."""

    new: list[RunFolder] = field(default_factory=list)
    existing: list[RunFolder] = field(default_factory=list)


def import_archive(
    archive: Path, install: Path, cluster: str | None = None, progress: ByteProgress = lambda count: None
) -> ImportResult:
    """Import the runs that do not exist yet; `cluster` overrides the origin of all its runs."""
    if cluster is not None and sanitize_cluster_name(cluster) != cluster:
        raise ConfigError(f"--as {cluster!r}: use letters, digits, '.', '_' and '-', at most 60")
    read_archive(archive, None, progress)  # nothing is created for an archive that is refused
    with _staging_folder(install) as staging:
        contents = read_archive(archive, staging, progress)
        used_ids = set(_used_ids(install))
        result = ImportResult()
        for run in contents.manifest.runs:
            existing = _find_run(install, run)
            if existing is not None:
                result.existing.append(existing)
                continue
            write_origin(RunFolder(staging / run.path), _origin(run, cluster, contents.checksum, used_ids))
            result.new.append(_move(staging / run.path, install / run.path))
        return result


@contextmanager
def _staging_folder(install: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same disk; one import at a time, which also cleans up after a killed one."""
    private = store_path(install).parent
    make_folder(private)
    with file_lock(private / "import.lock") as acquired:
        if not acquired:
            raise ConfigError("another llmb-run import is running; wait for it")
        try:
            for leftover in private.glob(f"{STAGING_PREFIX}*/"):
                shutil.rmtree(leftover)
            staging = Path(mkdtemp(prefix=STAGING_PREFIX, dir=private))
        except OSError as error:
            raise write_error(private, error) from error
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _origin(run: ArchivedRun, cluster: str | None, checksum: str, used_ids: set[str]) -> Origin:
    name = cluster or (run.cluster and sanitize_cluster_name(run.cluster)) or UNKNOWN_CLUSTER
    job_id = _unique_id(f"{_valid_id(run.job_id) or run.identity[:8]}@{name}", used_ids)
    return Origin(cluster=name, job_id=job_id, identity=run.identity, archive=checksum)


def _used_ids(install: Path) -> Iterator[str]:
    for run in RunFolder.find_all(install):
        with suppress(LlmbError):  # `jobs rebuild` reports a damaged folder
            origin = read_origin(run)
            if origin is not None:
                yield origin.job_id


def _find_run(install: Path, run: ArchivedRun) -> RunFolder | None:
    """Return the folder of this run, if it exists: under its own time stamp, or numbered where that was taken."""
    stamped = (install / run.path).parent
    for folder in _numbered(stamped):
        if not folder.exists():
            return None
        candidate = RunFolder(folder / stamped.parent.name)
        with suppress(LlmbError, OSError):  # a damaged folder of that name is another run
            if candidate.config.is_file() and run_identity(candidate) == run.identity:
                return RunFolder.open(candidate.path)
    raise AssertionError("count() never ends")


def _move(staged: Path, target: Path) -> RunFolder:
    """Move a run to the first free folder of its time stamp; mkdir is what claims it."""
    stamped = target.parent
    try:
        stamped.parent.mkdir(parents=True, exist_ok=True)
        for folder in _numbered(stamped):
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            os.rename(staged, folder / target.name)
            return RunFolder.open(folder / target.name)
    except OSError as error:
        raise write_error(stamped, error) from error
    raise AssertionError("count() never ends")


def _numbered(stamped: Path) -> Iterator[Path]:
    """Yield a time stamp's folder and those of other runs of the same second: _2, _3, ..."""
    yield stamped
    yield from (stamped.with_name(f"{stamped.name}_{number}") for number in count(2))


def _unique_id(job_id: str, used_ids: set[str]) -> str:
    candidates = (job_id if number == 1 else f"{job_id}.{number}" for number in count(1))
    unique_id = next(candidate for candidate in candidates if candidate not in used_ids)
    used_ids.add(unique_id)
    return unique_id


def _valid_id(job_id: str | None) -> str | None:
    """Return a job id from an untrusted file if it looks like one."""
    return job_id if job_id and re.fullmatch(r"[A-Za-z0-9._@-]{1,120}", job_id) else None
