"""Read an archive of runs as untrusted input, which may be damaged or malicious.

    manifest = read_archive(Path("runs.tar.zst"), into=None)        # only verify it

Its checksum is verified before a byte is unpacked. Then only regular files with paths in run folders are extracted,
each compared with its checksum; links, devices, folders, sparse files and anything not in the manifest are refused.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmb.config.serialization import build, open_regular_file
from llmb.errors import ConfigError
from llmb.launch.archive.checksummed_file import CHUNK_BYTES, BoundedDecompressor, verify_checksum, zstandard
from llmb.launch.archive.manifest import MANIFEST, ROOT, ArchivedFile, Manifest, check_manifest, check_name
from llmb.launch.run_folder import printable_path, write_error

MAX_MANIFEST_BYTES = 2**27  # of 300,000 files
MAX_JSON_FILE_BYTES = 2**28  # of config.json, result.json and the like, which are parsed as a whole later
MAX_FILE_BYTES = 2**36
MAX_TOTAL_BYTES = 2**40
MAX_PATH_PARTS = 16
MAX_VALUES_PER_FILE = 16  # of the manifest; 7 for a run of one file
MAX_HEADER_BYTES = 2**16  # of the pax header of a long name
MAX_FILES = 300_000
MAX_MTIME = 2**33  # seconds since 1970

ByteProgress = Callable[[int], None]


@dataclass(frozen=True)
class ArchiveContents:
    """Verified contents of an archive."""

    manifest: Manifest
    checksum: str


class RegularFileInfo(tarfile.TarInfo):
    """Tar header, refused before its data is read unless it is of a regular file or of a long name."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "RegularFileInfo":
        header = super().frombuf(buf, encoding, errors)
        long_name = header.type == tarfile.XHDTYPE and header.size <= MAX_HEADER_BYTES
        if header.type != tarfile.REGTYPE and not long_name:
            raise ConfigError(f"it holds {header.name[:200]!r}, which is not a regular file")
        return header


def read_archive(path: Path, into: Path | None, progress: ByteProgress = lambda count: None) -> ArchiveContents:
    """Verify an archive; with `into` also unpack it there. An invalid one raises a ConfigError."""
    try:
        file = open_regular_file(path)
    except OSError as error:
        raise ConfigError(f"cannot read {printable_path(path)}: {error.strerror}") from error
    with file:
        unpack_errors = (tarfile.TarError, EOFError, ValueError, OverflowError, zstandard().ZstdError, RecursionError)
        try:
            checksum = verify_checksum(file, progress)
            return ArchiveContents(_read(file, into, progress), checksum)
        except ConfigError as error:
            raise ConfigError(f"{printable_path(path)} is refused: {error}") from error
        except unpack_errors as error:
            raise ConfigError(f"{printable_path(path)} is refused: it cannot be unpacked ({error})") from error
        except OSError as error:
            raise write_error(into or path, error) from error


def _read(file: BinaryIO, into: Path | None, progress: ByteProgress) -> Manifest:
    manifest: Manifest | None = None
    files: list[ArchivedFile] = []
    names: set[str] = set()
    total = 0  # as declared; each file's real size is compared with its manifest entry
    with tarfile.open(fileobj=BoundedDecompressor(file), mode="r|", tarinfo=RegularFileInfo) as tar:  # type: ignore[call-overload]
        while (member := tar.next()) is not None:
            if manifest is not None:
                raise ConfigError("something follows its manifest")
            name = member.name.removeprefix(f"{ROOT}/")
            if name == MANIFEST:
                manifest = _manifest(tar, member, files)
                continue
            _check(member, name, names)
            total += member.size
            if total > MAX_TOTAL_BYTES:
                raise ConfigError(f"its files have more than {MAX_TOTAL_BYTES:,} bytes")
            files.append(_extract(tar, member, name, into, progress))
            tar.members = []  # else it keeps every header
    if manifest is None:
        raise ConfigError("its manifest is missing")
    check_manifest(manifest, files)
    return manifest


def _check(member: tarfile.TarInfo, name: str, names: set[str]) -> None:
    if not member.name.startswith(f"{ROOT}/") or not member.isreg() or member.issparse():
        raise ConfigError(f"it holds {member.name[:200]!r}, which is not a file of a run folder")
    check_name(name)
    if name in names or name.split("/")[6:] == ["origin.json"]:
        raise ConfigError(f"it holds {name} twice, or an origin.json")
    if not 0 <= member.mtime < MAX_MTIME:
        raise ConfigError(f"{name} has an invalid time")
    if name.count("/") >= MAX_PATH_PARTS:
        raise ConfigError(f"{name[:200]} lies more than {MAX_PATH_PARTS} folders deep")
    limit = MAX_JSON_FILE_BYTES if name.endswith(".json") else MAX_FILE_BYTES
    if member.size > limit:
        raise ConfigError(f"{name} has {member.size:,} bytes; at most {limit:,} are taken")
    names.add(name)
    if len(names) > MAX_FILES:
        raise ConfigError(f"it holds more than {MAX_FILES:,} files")


def _manifest(tar: tarfile.TarFile, member: tarfile.TarInfo, files: list[ArchivedFile]) -> Manifest:
    if member.size > MAX_MANIFEST_BYTES:
        raise ConfigError("its manifest is too large")
    stream = tar.extractfile(member)
    assert stream is not None, "it is a regular file"
    content = stream.read()
    if content.count(b",") > MAX_VALUES_PER_FILE * (len(files) + 1):  # before it is parsed, to many times its size
        raise ConfigError(f"its manifest lists more than its {len(files):,} files")
    return build(Manifest, json.loads(content), MANIFEST)


def _extract(
    tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, into: Path | None, progress: ByteProgress
) -> ArchivedFile:
    """Return one file's checksum; with `into` also write it, with its mode and time."""
    stream = tar.extractfile(member)
    assert stream is not None, "it is a regular file"
    digest, size = hashlib.sha256(), 0
    target = into / name if into else None
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "xb") if target else open(os.devnull, "wb") as out:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            size += len(chunk)
            progress(len(chunk))
    if target:
        target.chmod(0o755 if member.mode & 0o100 else 0o644)
        os.utime(target, (member.mtime, member.mtime))
    return ArchivedFile(path=name, bytes=size, sha256=digest.hexdigest())
