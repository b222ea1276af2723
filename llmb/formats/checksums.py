"""Files of checksums and whether what they say of other files is so: SHA256SUMS, *.sha256 and *.blake3.

A line is `HEX  NAME` as sha256sum and b3sum print it; in FILE.sha256 the hex number alone stands for FILE. BLAKE3 is
not in Python: where its package is not installed the caller is told, and nothing counts as checked.
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
AT_ONCE = 16 * 2**20  # bytes


@dataclass(frozen=True)
class Sums:
    """One file of checksums."""

    path: Path
    of: dict[str, str]  # a file's name -> its checksum
    strange: tuple[str, ...]  # lines that are none, or that name a file outside of the folder

    @property
    def unavailable(self) -> str | None:
        """Why these cannot be checked here, or None."""
        missing = _maker(self.path) is None
        return f"{self.path.name} ({len(self.of)} files): pip install blake3" if missing else None


def sums_in(folder: Path) -> list[Sums]:
    """Every file of checksums in a folder."""
    return [_read(path) for pattern in PATTERNS for path in sorted(folder.glob(pattern)) if path.is_file()]


def is_same(sums: Sums, name: str, progress: Callable[[int], None]) -> bool:
    """Whether a file has its checksum; `progress` is told of bytes as they are read."""
    maker = _maker(sums.path)
    assert maker is not None, "checksums that are unavailable are not to be checked"
    made = maker()
    for piece in _pieces(sums.path.parent / name):
        made.update(piece)
        progress(len(piece))
    return bool(made.hexdigest() == sums.of[name].lower())


def _read(path: Path) -> Sums:
    found: dict[str, str] = {}
    strange = []
    for line in _lines(path):
        match = LINE.fullmatch(line)
        name = str(PurePosixPath(match["name"] or path.stem)) if match else ""
        if match is None or name.startswith("/") or ".." in PurePosixPath(name).parts:
            strange.append(line)
        else:
            found[name] = match["hex"]
    return Sums(path, found, tuple(strange))


def _lines(path: Path) -> Iterable[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return (line for line in text.splitlines() if line.strip() and not line.startswith("#"))


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(AT_ONCE):
            yield piece


def _maker(path: Path) -> Callable[[], Any] | None:
    """What makes the checksums of a file of them, where it is installed."""
    if path.suffix != ".blake3":
        return hashlib.sha256
    return None if find_spec("blake3") is None else import_module("blake3").blake3
