"""What an archive of runs holds: its list of runs and files, which is its last member, and what may stand in it.

    llmb-archive/workloads/<target>/experiments/<name>/<name>_<timestamp>/<name>/<file>
    llmb-archive/manifest.json

The list is last because checksums are known only then, so that nothing needs to be packed twice.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath

from llmb.errors import ConfigError

FORMAT = 1
ROOT = "llmb-archive"
MANIFEST = "manifest.json"
LONGEST_PART = 255  # bytes, as file systems allow


@dataclass(frozen=True, kw_only=True)
class ArchivedRun:
    """One run folder."""

    path: str  # below the root, to <name>
    identity: str  # the same wherever this run lies
    job_id: str | None
    cluster: str | None  # where it was run; null: nothing says so


@dataclass(frozen=True, kw_only=True)
class ArchivedFile:
    """One file as it was packed, without its secrets."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is in an archive."""

    format: int
    runs: tuple[ArchivedRun, ...]
    files: tuple[ArchivedFile, ...]

    def files_of(self, run: ArchivedRun) -> list[ArchivedFile]:
        return [file for file in self.files if file.path.startswith(f"{run.path}/")]


def check_name(path: str) -> None:
    """Refuse a name that could lead out of the run folder it stands in, or that no archive of ours has."""
    parts = path.split("/")
    sound = all(part not in ("", ".", "..") and len(part.encode(errors="replace")) <= LONGEST_PART for part in parts)
    if not (sound and path.isprintable() and len(parts) > 6 and _is_run(parts[:6])):
        raise ConfigError(f"it holds {path[:200]!r}, which is no file of a run folder")


def check_manifest(manifest: Manifest, found: list[ArchivedFile]) -> None:
    """Refuse what does not agree with itself or with what was found in the archive."""
    if manifest.format != FORMAT:
        raise ConfigError(f"it has format {manifest.format}, this llmb reads {FORMAT}")
    if list(manifest.files) != found:
        expected, there = (Counter((f.path, f.bytes, f.sha256) for f in files) for files in (manifest.files, found))
        wrong = sorted({path for path, _, _ in (expected - there) + (there - expected)})
        raise ConfigError(f"{', '.join(wrong[:3]) or 'the order of its files'} is not as its list says")
    runs = {run.path for run in manifest.runs}
    for file in found:
        if "/".join(file.path.split("/")[:6]) not in runs:
            raise ConfigError(f"{file.path} belongs to none of its runs")
    names = {file.path for file in found}
    for run in manifest.runs:
        if not _is_run(run.path.split("/")) or f"{run.path}/config.json" not in names:
            raise ConfigError(f"{run.path[:200]!r} in its list is no run folder")
        if not run.identity.isalnum():
            raise ConfigError(f"the identity of {run.path} in its list is none")
    if len(runs) != len(manifest.runs):
        raise ConfigError("its list names a run twice")


def is_run_path(path: PurePosixPath) -> bool:
    """Whether a path below the root is that of a run folder."""
    return _is_run(list(path.parts))


def _is_run(parts: list[str]) -> bool:
    return len(parts) == 6 and (parts[0], parts[2]) == ("workloads", "experiments") and parts[3] == parts[5]
