"""Read and verify checksum files: SHA256SUMS, *.sha256 and *.blake3.

A line is `HEX  NAME` as sha256sum and b3sum print it; in FILE.sha256 the digest alone stands for FILE. BLAKE3 is not in
Python: without its package `unavailable` says so, and nothing counts as checked.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

PATTERNS = ("SHA256SUMS", "*.sha256", "*.blake3")
LINE = re.compile(r"\\?(?P<hex>[0-9a-fA-F]{64})(?:\s+\*?(?P<name>\S.*?))?\s*")
CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ChecksumFile:
    """Parsed checksum file."""

    path: Path
    digests: dict[str, str]  # file name -> hex digest
    invalid_lines: tuple[str, ...]  # not a checksum, or of a file outside of the folder

    @property
    def unavailable(self) -> str | None:
        """Why these checksums cannot be verified here, or None."""
        missing = _hash_function(self.path) is None
        return f"{self.path.name} ({len(self.digests)} files): pip install blake3" if missing else None


def checksum_files(folder: Path) -> list[ChecksumFile]:
    """Return all checksum files of a folder."""
    return [_read(path) for pattern in PATTERNS for path in sorted(folder.glob(pattern)) if path.is_file()]


def verify_checksum(checksums: ChecksumFile, name: str, progress: Callable[[int], None]) -> bool:
    """Return whether a file matches its checksum; `progress` is called with the bytes of each chunk read."""
    hash_function = _hash_function(checksums.path)
    assert hash_function is not None, "unavailable checksums must not be verified"
    digest = hash_function()
    for chunk in _chunks(checksums.path.parent / name):
        digest.update(chunk)
        progress(len(chunk))
    return bool(digest.hexdigest() == checksums.digests[name].lower())


def _read(path: Path) -> ChecksumFile:
    digests: dict[str, str] = {}
    invalid_lines = []
    for line in _lines(path):
        match = LINE.fullmatch(line)
        name = str(PurePosixPath(match["name"] or path.stem)) if match else ""
        if match is None or name.startswith("/") or ".." in PurePosixPath(name).parts:
            invalid_lines.append(line)
        else:
            digests[name] = match["hex"]
    return ChecksumFile(path, digests, tuple(invalid_lines))


def _lines(path: Path) -> Iterable[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return (line for line in text.splitlines() if line.strip() and not line.startswith("#"))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _hash_function(path: Path) -> Callable[[], Any] | None:
    """Return the hash function of a checksum file, if it is installed."""
    if path.suffix != ".blake3":
        return hashlib.sha256
    return None if find_spec("blake3") is None else import_module("blake3").blake3
