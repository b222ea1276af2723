"""Pack run folders for others to read: one .tar.zst without profiles, checkpoints and secrets.

    write_archive(runs, Path("runs.tar.zst"), os.environ)

The same folders give the same bytes: sorted, owned by nobody, with the files' own times, packed by one thread. Secrets
go by name, by shape, and by value where the environment or another file of these runs tells it. What was written is
read back before it gets its name; a file that is there is never written over, and none is left half-done.
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
from tempfile import SpooledTemporaryFile

from llmb.config.serialization import to_json
from llmb.errors import ConfigError, LaunchError
from llmb.launch.archive.checksummed_file import packing, seal
from llmb.launch.archive.manifest import FORMAT, MANIFEST, ROOT, ArchivedFile, ArchivedRun, Manifest, is_run_path
from llmb.launch.archive.run_origin import cluster_of, identity_of
from llmb.launch.archive.scrub_files import Scrubber, is_text, pieces
from llmb.launch.archive.unpack import Progress, read_archive
from llmb.launch.run_folder import RunDir, is_alive, shown

LEFT_FOLDERS = {"profile", "profiles", "checkpoint", "checkpoints", "code", "nsys_profile", "torch_profile",
                "pytorch_profile", "__pycache__"}  # fmt: skip
LEFT_FILES = (
    "*.nsys-rep", "*.qdrep", "*.ncu-rep", "*.sqlite", "*trace.json", "*.trace",  # profiles and traces
    "*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.distcp", "*.bin", "*.npy", "*.npz",  # weights and state
    "*.tar", "*.tar.*", "*.tgz", "*.gz", "*.zst", "*.xz", "*.bz2", "*.zip",  # nobody can look into these for secrets
    "core", "core.[0-9]*", ".*", "pid",  # dumps of memory, files not yet renamed, processes of this machine
)  # fmt: skip
HELD_IN_MEMORY = 64 * 2**20  # bytes of one scrubbed file, beyond which it waits on disk


@dataclass(frozen=True, kw_only=True)
class Written:
    """What an archive came to."""

    output: Path
    seal: str
    runs: int
    files: int
    bytes: int  # unpacked
    left_out: tuple[str, ...]  # files that might be missed: no text, links, or with names that cannot be carried


def is_over(run: RunDir) -> bool:
    """Whether a run has ended: a folder that is still being written to cannot be packed truly."""
    return run.result.exists() or run.ending.exists() or (is_alive(run) is False and bool(run.all_events()))


def write_archive(
    runs: Iterable[RunDir],
    output: Path,
    environ: Mapping[str, str],
    *,
    anonymous: bool = False,
    progress: Progress = lambda count: None,
) -> Written:
    """Pack these runs into a new file, and read it back."""
    folders = _by_place(runs)
    listed = _listed(folders)
    left_out: list[str] = []
    chosen = {place: _files(run, left_out) for place, run in sorted(folders.items())}
    everything = [path for paths in chosen.values() for path in paths]
    with _claimed(output) as aside:
        scrubber = Scrubber.knowing(everything, environ, anonymous, progress)
        with aside.open("w+b") as file:
            with packing(file) as stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                files = [
                    _add(tar, path, f"{place}/{path.relative_to(folders[place].path).as_posix()}", scrubber, progress)
                    for place, paths in chosen.items()
                    for path in paths
                    if _is_carried(path, folders[place], scrubber, left_out)
                ]
                manifest = Manifest(format=FORMAT, runs=listed, files=tuple(files))
                _add_text(tar, to_json(manifest, indent=1) + "\n")
            seal(file)
        read = read_archive(aside, None, progress)
        if read.manifest != manifest:
            raise LaunchError(f"{shown(output)} did not read back as it was written; try another disk")
    total = sum(file.bytes for file in files)
    return Written(
        output=output, seal=read.seal, runs=len(folders), files=len(files), bytes=total, left_out=tuple(left_out)
    )


@contextmanager
def _claimed(output: Path) -> Iterator[Path]:
    """Take the name, give a file beside it to write to; that one gets the name, or nothing is left of either."""
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.open("xb").close()
    except FileExistsError as error:
        raise ConfigError(f"{shown(output)} exists and is not written over; choose another --output") from error
    except OSError as error:
        raise ConfigError(f"cannot write {shown(output)}: {error.strerror}; choose another --output") from error
    try:
        yield aside
        os.replace(aside, output)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        output.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise LaunchError(f"cannot write {shown(output)}: {error.strerror}") from error
        raise


def _by_place(runs: Iterable[RunDir]) -> dict[str, RunDir]:
    folders: dict[str, RunDir] = {}
    for run in runs:
        rival = folders.setdefault(_place(run), run)
        if rival.path != run.path:
            raise ConfigError(f"{shown(rival.path)} and {shown(run.path)} have one name; archive them one by one")
    if not folders:
        raise ConfigError("there are no runs to archive")
    return folders


def _place(run: RunDir) -> str:
    """Where a run folder stands below any $LLMB_INSTALL."""
    place = PurePosixPath(*run.path.parts[-6:])
    if not is_run_path(place):
        raise ConfigError(f"{shown(run.path)} lies outside of workloads/<workload>/experiments; it cannot be archived")
    return str(place)


def _listed(folders: Mapping[str, RunDir]) -> tuple[ArchivedRun, ...]:
    return tuple(
        ArchivedRun(path=place, identity=identity_of(run), job_id=run.job_id, cluster=cluster_of(run))
        for place, run in sorted(folders.items())
    )


def _files(run: RunDir, left_out: list[str]) -> list[Path]:
    """The files of a run folder that are worth sending, sorted."""
    found = []
    for folder, folders, names in os.walk(run.path, onerror=_refuse):
        folders[:] = [name for name in folders if name not in LEFT_FOLDERS and not name.startswith(".")]
        for path in (Path(folder) / name for name in names):
            if path == run.origin or any(fnmatchcase(path.name, kind) for kind in LEFT_FILES):
                continue
            if path.is_symlink() or not path.is_file() or not is_text(path):
                left_out.append(shown(path))
            else:
                found.append(path)
    return sorted(found)


def _refuse(error: OSError) -> None:
    """A folder that cannot be looked into must not be missing unsaid."""
    raise LaunchError(f"cannot read {shown(Path(error.filename))}: {error.strerror}") from error


def _is_carried(path: Path, run: RunDir, scrubber: Scrubber, left_out: list[str]) -> bool:
    """Whether a file's name can stand in an archive: it can be printed, and is no secret itself."""
    name = path.relative_to(run.path).as_posix()
    if name.isprintable() and scrubber.scrub(name) == name:
        return True
    left_out.append(shown(path))
    return False


def _add(tar: tarfile.TarFile, path: Path, place: str, scrubber: Scrubber, progress: Progress) -> ArchivedFile:
    """Pack one file without its secrets; gives what it became."""
    with SpooledTemporaryFile(HELD_IN_MEMORY) as cleaned:
        made = hashlib.sha256()
        for piece in pieces(path):
            clean = scrubber.scrub_piece(piece, path.suffix)
            made.update(clean)
            cleaned.write(clean)
            progress(len(piece))
        size = cleaned.tell()
        cleaned.seek(0)
        status = path.stat()
        tar.addfile(_header(place, size, max(0, int(status.st_mtime)), bool(status.st_mode & 0o100)), cleaned)
    return ArchivedFile(path=place, bytes=size, sha256=made.hexdigest())


def _add_text(tar: tarfile.TarFile, text: str) -> None:
    content = text.encode()
    tar.addfile(_header(MANIFEST, len(content), 0, False), io.BytesIO(content))


def _header(place: str, size: int, changed_at: int, executable: bool) -> tarfile.TarInfo:
    header = tarfile.TarInfo(f"{ROOT}/{place}")
    header.size, header.mtime, header.mode = size, changed_at, 0o755 if executable else 0o644
    return header
