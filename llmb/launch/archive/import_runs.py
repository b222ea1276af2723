"""Bring runs of another cluster into this installation, beside its own.

    import_archive(Path("runs.tar.zst"), install) -> Imported(new=[...], known=[...])

An archive is unpacked aside and checked wholly; only then does each run folder, marked with where it comes from, move
to its place by one rename. A run that is here already is left as it is, so importing twice changes nothing; another run
of the same name and second gets the next free folder.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

from llmb.errors import ConfigError
from llmb.launch.archive.manifest import ArchivedRun
from llmb.launch.archive.run_origin import UNKNOWN_CLUSTER, Origin, fit_for_id, identity_of, keep_origin, origin_of
from llmb.launch.archive.unpack import Progress, read_archive
from llmb.launch.run_folder import RunDir, make_folder, refusal, store_path
from llmb.launch.run_lock import locked

STAGING = "import-"


@dataclass(frozen=True)
class Imported:
    """Run folders that came, and those that were here before."""

    new: list[RunDir] = field(default_factory=list)
    known: list[RunDir] = field(default_factory=list)


def import_archive(
    archive: Path, install: Path, cluster: str | None = None, progress: Progress = lambda count: None
) -> Imported:
    """Unpack what is not here yet; `cluster` names the origin of all its runs anew."""
    if cluster is not None and fit_for_id(cluster) != cluster:
        raise ConfigError(f"--as {cluster!r}: use letters, digits, '.', '_' and '-', at most 60")
    read_archive(archive, None, progress)  # nothing is made for an archive that is refused
    with _staging(install) as aside:
        read = read_archive(archive, aside, progress)
        taken = {origin.job_id for run in RunDir.find_all(install) if (origin := origin_of(run))}
        done = Imported()
        for run in read.manifest.runs:
            here = _same_run(install, run)
            if here is not None:
                done.known.append(here)
                continue
            keep_origin(RunDir(aside / run.path), _origin(run, cluster, read.seal, taken))
            done.new.append(_move(aside / run.path, install / run.path))
        return done


@contextmanager
def _staging(install: Path) -> Iterator[Path]:
    """A folder on the same disk that is gone in the end; one import at a time, which also clears after a killed one."""
    private = store_path(install).parent
    make_folder(private)
    with locked(private / "import.lock") as alone:
        if not alone:
            raise ConfigError("another llmb-run import goes on here; wait for it")
        try:
            for left in private.glob(f"{STAGING}*/"):
                shutil.rmtree(left)
            aside = Path(mkdtemp(prefix=STAGING, dir=private))
        except OSError as error:
            raise refusal(private, error) from error
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _origin(run: ArchivedRun, cluster: str | None, seal: str, taken: set[str]) -> Origin:
    name = cluster or (run.cluster and fit_for_id(run.cluster)) or UNKNOWN_CLUSTER
    job_id = _free_id(f"{_plain(run.job_id) or run.identity[:8]}@{name}", taken)
    return Origin(cluster=name, job_id=job_id, identity=run.identity, archive=seal)


def _same_run(install: Path, run: ArchivedRun) -> RunDir | None:
    """This run's folder here, if it is here: at its own place or at one it was given as that was taken."""
    stamped = (install / run.path).parent
    for folder in _numbered(stamped):
        if not folder.exists():
            return None
        there = RunDir(folder / stamped.parent.name)
        if there.config.is_file() and identity_of(there) == run.identity:
            return RunDir.open(there.path)
    raise AssertionError("count() never ends")


def _move(staged: Path, target: Path) -> RunDir:
    """Into the first of its folders that nobody has; making it is what claims it."""
    stamped = target.parent
    try:
        stamped.parent.mkdir(parents=True, exist_ok=True)
        for folder in _numbered(stamped):
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            os.rename(staged, folder / target.name)
            return RunDir.open(folder / target.name)
    except OSError as error:
        raise refusal(stamped, error) from error
    raise AssertionError("count() never ends")


def _numbered(stamped: Path) -> Iterator[Path]:
    """A time stamp's folder and those that runs of the same second get: _2, _3, ..."""
    yield stamped
    yield from (stamped.with_name(f"{stamped.name}_{number}") for number in count(2))


def _free_id(job_id: str, taken: set[str]) -> str:
    wanted = (job_id if number == 1 else f"{job_id}.{number}" for number in count(1))
    free = next(one for one in wanted if one not in taken)
    taken.add(free)
    return free


def _plain(job_id: str | None) -> str | None:
    """A job id from somebody else's file: it becomes part of ours only if it looks like one."""
    return job_id if job_id and re.fullmatch(r"[A-Za-z0-9._@-]{1,120}", job_id) else None
