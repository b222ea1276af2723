"""Read an archive of runs as what it is: a file from somewhere else, which may be damaged or made to do harm.

    manifest = read_archive(Path("runs.tar.zst"), into=None)        # only check it

Its seal is checked before a byte is unpacked. Then only plain files with the names of run folders are taken, each
compared with its checksum; links, devices, folders, sparse files and anything that is not in its list are refused.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmb.config.serialization import build
from llmb.errors import ConfigError
from llmb.launch.archive.checksummed_file import AT_ONCE, Unpacked, check_seal, zstandard
from llmb.launch.archive.manifest import MANIFEST, ROOT, ArchivedFile, Manifest, check_manifest, check_name
from llmb.launch.run_folder import refusal, shown

LARGEST_LIST = 2**30  # bytes
LONGEST_HEADER = 2**16  # bytes of what is said of one file, where its name is long
MOST_FILES = 2_000_000
LATEST = 2**33  # seconds since 1970

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Read:
    """What was found in an archive."""

    manifest: Manifest
    seal: str


class PlainFile(tarfile.TarInfo):
    """A header, refused before anything behind it is read unless it is that of a plain file or of a long name."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "PlainFile":
        header = super().frombuf(buf, encoding, errors)
        long_name = header.type == tarfile.XHDTYPE and header.size <= LONGEST_HEADER
        if header.type != tarfile.REGTYPE and not long_name:
            raise ConfigError(f"it holds {header.name[:200]!r}, which is not a plain file")
        return header


def read_archive(path: Path, into: Path | None, progress: Progress = lambda count: None) -> Read:
    """Check all of an archive; with `into` also unpack it there. A wrong one is refused in one line."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {shown(path)}: {error.strerror}") from error
    with file:
        broken = (tarfile.TarError, EOFError, ValueError, OverflowError, zstandard().ZstdError, RecursionError)
        try:
            seal = check_seal(file, progress)
            return Read(_read(file, into, progress), seal)
        except ConfigError as error:
            raise ConfigError(f"{shown(path)} is refused: {error}") from error
        except broken as error:
            raise ConfigError(f"{shown(path)} is refused: it cannot be unpacked ({error})") from error
        except OSError as error:
            raise refusal(into or path, error) from error


def _read(file: BinaryIO, into: Path | None, progress: Progress) -> Manifest:
    manifest: Manifest | None = None
    found: list[ArchivedFile] = []
    names: set[str] = set()
    with tarfile.open(fileobj=Unpacked(file), mode="r|", tarinfo=PlainFile) as tar:  # type: ignore[call-overload]
        while (member := tar.next()) is not None:
            if manifest is not None:
                raise ConfigError("something stands behind its list of files")
            name = member.name.removeprefix(f"{ROOT}/")
            if name == MANIFEST:
                manifest = _manifest(tar, member)
                continue
            _check(member, name, names)
            found.append(_take(tar, member, name, into, progress))
            tar.members = []  # it would remember every header
    if manifest is None:
        raise ConfigError("its list of files is missing")
    check_manifest(manifest, found)
    return manifest


def _check(member: tarfile.TarInfo, name: str, names: set[str]) -> None:
    if not member.name.startswith(f"{ROOT}/") or not member.isreg() or member.issparse():
        raise ConfigError(f"it holds {member.name[:200]!r}, which is no file of a run folder")
    check_name(name)
    if name in names or name.split("/")[6:] == ["origin.json"]:
        raise ConfigError(f"it holds {name} twice or says itself where it comes from")
    if not 0 <= member.mtime < LATEST:
        raise ConfigError(f"{name} has an impossible time")
    names.add(name)
    if len(names) > MOST_FILES:
        raise ConfigError(f"it holds more than {MOST_FILES:,} files")


def _manifest(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Manifest:
    if member.size > LARGEST_LIST:
        raise ConfigError("its list of files is too large")
    stream = tar.extractfile(member)
    assert stream is not None, "it is a plain file"
    return build(Manifest, json.loads(stream.read()), MANIFEST)


def _take(
    tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, into: Path | None, progress: Progress
) -> ArchivedFile:
    """One file's checksum and, where there is a folder, its content, mode and time."""
    stream = tar.extractfile(member)
    assert stream is not None, "it is a plain file"
    made, size = hashlib.sha256(), 0
    target = into / name if into else None
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "xb") if target else open(os.devnull, "wb") as out:
        while piece := stream.read(AT_ONCE):
            made.update(piece)
            out.write(piece)
            size += len(piece)
            progress(len(piece))
    if target:
        target.chmod(0o755 if member.mode & 0o100 else 0o644)
        os.utime(target, (member.mtime, member.mtime))
    return ArchivedFile(path=name, bytes=size, sha256=made.hexdigest())
