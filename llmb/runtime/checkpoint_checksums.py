"""Checksums of the files of a checkpoint: written with it, checked while it is loaded.

    files = checksums(paths)                         # when they are on disk; `commit` records them
    checking = CheckpointCheck(checkpoint)           # reads the files in a thread, beside the load
    checking.damage()                                # waits; None: every file is as it was written

CRC-32, which finds every error of up to 32 bits in a row, at several GB/s: an error of a disk or a transfer, not
an attack. A thread that computes it leaves the interpreter to others.
"""

import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llmb.errors import ConfigError
from llmb.runtime.checkpoint_folder import IDENTITY, FileChecksums, checkpoint_step, complete_checkpoints, read_identity

PIECE_BYTES = 8 << 20  # read at a time


def checksums(paths: Iterable[Path]) -> FileChecksums:
    """Return size and CRC-32 of each file by its name."""
    return {path.name: _checksum(path) for path in paths}


def find_damage(checkpoint: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return what is wrong with the first bad file of a checkpoint; None: nothing, or nothing is recorded.

    Of several ranks each can check a part of the files.
    """
    recorded = read_identity(checkpoint).get("files")
    if recorded is None:
        return None
    if not isinstance(recorded, dict):
        return f"{IDENTITY} has no list of files"
    for name, expected in sorted(recorded.items())[part::parts]:
        if (reason := _difference(checkpoint / name, expected)) is not None:
            return f"{name} {reason}"
    return None


def damaged_error(checkpoint: Path, damage: str) -> ConfigError:
    """Return the error of a damaged checkpoint, which offers the newest older one that is not."""
    older = [
        path for path in complete_checkpoints(checkpoint.parent) if checkpoint_step(path) < checkpoint_step(checkpoint)
    ]
    intact = next((path for path in reversed(older) if _is_intact(path)), None)
    offer = "no older one is intact" if intact is None else f"resume={intact} continues from an older one"
    return ConfigError(f"resume: {checkpoint} is damaged: {damage}; {offer}")


class CheckpointCheck:
    """A check of a part of a checkpoint's files in a thread."""

    def __init__(self, checkpoint: Path, part: int = 0, parts: int = 1):
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums")
        self._future: Future[str | None] = executor.submit(find_damage, checkpoint, part, parts)
        executor.shutdown(wait=False)  # ends with the check

    def damage(self) -> str | None:
        """Wait for the check and return what is wrong."""
        return self._future.result()


def _checksum(path: Path) -> dict[str, int]:
    crc = size = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return {"bytes": size, "crc32": crc}


def _difference(path: Path, expected: Any) -> str | None:
    try:
        actual = _checksum(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if actual == expected:
        return None
    written = expected.get("bytes") if isinstance(expected, dict) else None
    if actual["bytes"] != written:
        return f"has {actual['bytes']:,} bytes, {written:,} were written" if isinstance(written, int) else "is unknown"
    return "is not what was written: its checksum differs"


def _is_intact(checkpoint: Path) -> bool:
    try:
        return find_damage(checkpoint) is None
    except ConfigError:
        return False
