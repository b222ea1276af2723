"""Manifest of an archive of runs: the list of its runs and files, which is its last member, and its checks.

    llmb-archive/workloads/<target>/experiments/<name>/<name>_<timestamp>/<name>/<file>
    llmb-archive/manifest.json

It is last because checksums are known only then, so that nothing is packed twice.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath

from llmb.errors import ConfigError

FORMAT = 1
ROOT = "llmb-archive"
MANIFEST = "manifest.json"
MAX_NAME_BYTES = 255  # of one path component


@dataclass(frozen=True, kw_only=True)
class ArchivedRun:
    """One run folder."""

    path: str  # below the root, to <name>
    identity: str  # independent of where the run is stored
    job_id: str | None
    cluster: str | None  # where it was run; None: unknown


@dataclass(frozen=True, kw_only=True)
class ArchivedFile:
    """One file as packed, without secrets."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of an archive."""

    format: int
    runs: tuple[ArchivedRun, ...]
    files: tuple[ArchivedFile, ...]


def check_name(path: str) -> None:
    """Refuse a path that could escape its run folder, or that is not in a run folder."""
    parts = path.split("/")
    valid = all(part not in ("", ".", "..") and len(part.encode(errors="replace")) <= MAX_NAME_BYTES for part in parts)
    if not (valid and path.isprintable() and len(parts) > 6 and _is_run(parts[:6])):
        raise ConfigError(f"it holds {path[:200]!r}, which is not a file of a run folder")


def check_manifest(manifest: Manifest, archived: list[ArchivedFile]) -> None:
    """Refuse a manifest that is inconsistent, or does not match the files in the archive."""
    if manifest.format != FORMAT:
        raise ConfigError(f"it has format {manifest.format}, this llmb reads {FORMAT}")
    if list(manifest.files) != archived:
        expected, actual = (Counter((f.path, f.bytes, f.sha256) for f in files) for files in (manifest.files, archived))
        wrong = sorted({path for path, _, _ in (expected - actual) + (actual - expected)})
        raise ConfigError(f"{', '.join(wrong[:3]) or 'the order of its files'} does not match its manifest")
    runs = {run.path for run in manifest.runs}
    for file in archived:
        if "/".join(file.path.split("/")[:6]) not in runs:
            raise ConfigError(f"{file.path} belongs to none of its runs")
    names = {file.path for file in archived}
    for run in manifest.runs:
        if not _is_run(run.path.split("/")) or f"{run.path}/config.json" not in names:
            raise ConfigError(f"{run.path[:200]!r} in its manifest is not a run folder")
        if not run.identity.isalnum():
            raise ConfigError(f"the identity of {run.path} in its manifest is invalid")
    if len(runs) != len(manifest.runs):
        raise ConfigError("its manifest lists a run twice")


def is_run_path(path: PurePosixPath) -> bool:
    """Return whether a path below the root is that of a run folder."""
    return _is_run(list(path.parts))


def _is_run(parts: list[str]) -> bool:
    return len(parts) == 6 and (parts[0], parts[2]) == ("workloads", "experiments") and parts[3] == parts[5]
