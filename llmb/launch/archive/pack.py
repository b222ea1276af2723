"""Pack run folders into one .tar.zst without profiles, checkpoints and secrets.

    write_archive(runs, Path("runs.tar.zst"), os.environ)

The same folders give the same bytes: sorted, without owners, with the files' own times, compressed by one thread.
Secrets are scrubbed by name, by pattern, and by value where the environment or another file of these runs holds it. The
archive is verified before it gets its name; an existing file is never overwritten, and no partial file is left.
"""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile

from llmb.config.serialization import create_new, temporary_path, to_json
from llmb.errors import ConfigError, LaunchError
from llmb.launch.archive.checksummed_file import append_checksum, compressed_writer
from llmb.launch.archive.manifest import FORMAT, MANIFEST, ROOT, ArchivedFile, ArchivedRun, Manifest, is_run_path
from llmb.launch.archive.run_origin import run_cluster, run_identity
from llmb.launch.archive.scrub_files import Scrubber, is_text, read_chunks
from llmb.launch.archive.unpack import ByteProgress, read_archive
from llmb.launch.run_files.pid_file import is_alive
from llmb.launch.run_folder import CONFIG_FILE, RunFolder, printable_path

EXCLUDED_FOLDERS = {"profile", "profiles", "checkpoint", "checkpoints", "code", "nsys_profile", "torch_profile",
                "pytorch_profile", "__pycache__"}  # fmt: skip
EXCLUDED_FILES = (
    "*.nsys-rep", "*.qdrep", "*.ncu-rep", "*.sqlite", "*trace.json", "*.trace",  # profiles and traces
    "*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.distcp", "*.bin", "*.npy", "*.npz",  # weights and state
    "*.tar", "*.tar.*", "*.tgz", "*.gz", "*.zst", "*.xz", "*.bz2", "*.zip",  # cannot be searched for secrets
    "core", "core.[0-9]*", ".*", "pid",  # core dumps, temporary files, processes of this machine
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ArchiveSummary:
    """Summary of a written archive."""

    output: Path
    checksum: str
    runs: int
    files: int
    bytes: int  # unpacked
    left_out: tuple[str, ...]  # files that might be missed: binary, links, or with unsafe names


def has_ended(run: RunFolder) -> bool:
    """Return whether a run has ended: a folder that is still being written to cannot be packed."""
    return run.result.exists() or run.job_outcome.exists() or (is_alive(run) is False and bool(run.all_events()))


def check_packable(run: RunFolder) -> None:
    """Raise what would stop an archive with this run: an unreadable file or folder, a damaged origin or event file."""
    _archived_runs({_archive_path(run): run})
    files = _files(run, [])
    if run.path / CONFIG_FILE not in files:
        raise ConfigError(f"its {CONFIG_FILE} is no text file")
    for path in files:
        with path.open("rb"):
            pass


def write_archive(
    runs: Iterable[RunFolder],
    output: Path,
    environ: Mapping[str, str],
    *,
    anonymous: bool = False,
    progress: ByteProgress = lambda count: None,
) -> ArchiveSummary:
    """Pack these runs into a new file, and verify it."""
    folders = _by_archive_path(runs)
    archived_runs = _archived_runs(folders)
    left_out: list[str] = []
    files_by_run = {run_path: _files(run, left_out) for run_path, run in sorted(folders.items())}
    all_files = [path for paths in files_by_run.values() for path in paths]
    with _claim(output) as temporary:
        scrubber = Scrubber.from_files(all_files, environ, anonymous, progress)
        with open(create_new(temporary), "w+b") as file:
            with (
                compressed_writer(file) as stream,
                tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
            ):
                files = [
                    _add(
                        tar,
                        path,
                        f"{run_path}/{path.relative_to(folders[run_path].path).as_posix()}",
                        scrubber,
                        progress,
                    )
                    for run_path, paths in files_by_run.items()
                    for path in paths
                    if _has_safe_name(path, folders[run_path], scrubber, left_out)
                ]
                manifest = Manifest(format=FORMAT, runs=archived_runs, files=tuple(files))
                _add_manifest(tar, to_json(manifest, indent=1) + "\n")
            append_checksum(file)
        contents = read_archive(temporary, None, progress)
        if contents.manifest != manifest:
            raise LaunchError(f"{printable_path(output)} did not read back as it was written; try another disk")
    total = sum(file.bytes for file in files)
    return ArchiveSummary(
        output=output,
        checksum=contents.checksum,
        runs=len(folders),
        files=len(files),
        bytes=total,
        left_out=tuple(left_out),
    )


@contextmanager
def _claim(output: Path) -> Iterator[Path]:
    """Claim the output path, yield a temporary file to write; rename it on success, remove both on failure."""
    temporary = temporary_path(output)
    try:
        output.open("xb").close()
    except FileExistsError as error:
        raise ConfigError(f"{printable_path(output)} exists and is not overwritten; choose another --output") from error
    except OSError as error:
        raise ConfigError(
            f"cannot write {printable_path(output)}: {error.strerror}; choose another --output"
        ) from error
    try:
        yield temporary
        os.replace(temporary, output)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        output.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise LaunchError(f"cannot write {printable_path(output)}: {error.strerror}") from error
        raise


def _by_archive_path(runs: Iterable[RunFolder]) -> dict[str, RunFolder]:
    folders: dict[str, RunFolder] = {}
    for run in runs:
        first = folders.setdefault(_archive_path(run), run)
        if first.path != run.path:
            raise ConfigError(
                f"{printable_path(first.path)} and {printable_path(run.path)} have one name; archive them one by one"
            )
    if not folders:
        raise ConfigError("there are no runs to archive")
    return folders


def _archive_path(run: RunFolder) -> str:
    """Return the path of a run folder below $LLMB_INSTALL."""
    path = PurePosixPath(*run.path.parts[-6:])
    if not is_run_path(path):
        raise ConfigError(
            f"{printable_path(run.path)} is outside of workloads/<workload>/experiments; it cannot be archived"
        )
    return str(path)


def _archived_runs(folders: Mapping[str, RunFolder]) -> tuple[ArchivedRun, ...]:
    return tuple(
        ArchivedRun(path=path, identity=run_identity(run), job_id=run.job_id, cluster=run_cluster(run))
        for path, run in sorted(folders.items())
    )


def _files(run: RunFolder, left_out: list[str]) -> list[Path]:
    """Return the files of a run folder to pack, sorted."""
    files = []
    for folder, folders, names in os.walk(run.path, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS and not name.startswith(".")]
        for path in (Path(folder) / name for name in names):
            if path == run.origin or any(fnmatchcase(path.name, pattern) for pattern in EXCLUDED_FILES):
                continue
            if path.is_symlink() or not path.is_file() or not is_text(path):
                left_out.append(printable_path(path))
            else:
                files.append(path)
    return sorted(files)


def _raise_unreadable(error: OSError) -> None:
    """Refuse a folder that cannot be read, instead of leaving it out silently."""
    raise LaunchError(f"cannot read {printable_path(Path(error.filename))}: {error.strerror}") from error


def _has_safe_name(path: Path, run: RunFolder, scrubber: Scrubber, left_out: list[str]) -> bool:
    """Return whether a file's name is printable and holds no secret."""
    name = path.relative_to(run.path).as_posix()
    if name == CONFIG_FILE or (name.isprintable() and scrubber.scrub(name) == name):  # without it there is no run
        return True
    left_out.append(printable_path(path))
    return False


def _add(
    tar: tarfile.TarFile, path: Path, archive_path: str, scrubber: Scrubber, progress: ByteProgress
) -> ArchivedFile:
    """Pack one file without its secrets; return its manifest entry."""
    with TemporaryFile() as scrubbed:
        digest = hashlib.sha256()
        for chunk in read_chunks(path):
            clean = scrubber.scrub_chunk(chunk, path.suffix)
            digest.update(clean)
            scrubbed.write(clean)
            progress(len(chunk))
        size = scrubbed.tell()
        scrubbed.seek(0)
        status = path.stat()
        tar.addfile(_header(archive_path, size, max(0, int(status.st_mtime)), bool(status.st_mode & 0o100)), scrubbed)
    return ArchivedFile(path=archive_path, bytes=size, sha256=digest.hexdigest())


def _add_manifest(tar: tarfile.TarFile, text: str) -> None:
    content = text.encode()
    tar.addfile(_header(MANIFEST, len(content), 0, False), io.BytesIO(content))


def _header(path: str, size: int, mtime: int, executable: bool) -> tarfile.TarInfo:
    header = tarfile.TarInfo(f"{ROOT}/{path}")
    header.size, header.mtime, header.mode = size, mtime, 0o755 if executable else 0o644
    return header
