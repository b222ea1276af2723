"""Checksums of the files of a checkpoint: written with it, checked while it is loaded.

    files = checksums(paths)                         # when they are on disk; `commit` records them
    checking = CheckpointCheck(checkpoint)           # reads the files in a thread, beside the load
    checking.damage()                                # waits; None: every file is as it was written

What is found: `file_checksum.py`. Checkpoints of older versions have a CRC-32 of each file instead, or nothing.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llmb.errors import ConfigError
from llmb.runtime.checkpoint_folder import IDENTITY, FileChecksums, checkpoint_step, complete_checkpoints, read_identity
from llmb.runtime.checksums.file_checksum import crc32, word_sums

ALGORITHMS = {"word_sums": word_sums, "crc32": crc32}  # by the key of their digest in checkpoint.json


def checksums(paths: Iterable[Path]) -> FileChecksums:
    """Return size and checksum of each file by its name."""
    return {path.name: _checksum(path, "word_sums") for path in paths}


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


def _checksum(path: Path, algorithm: str) -> dict[str, int]:
    size, digest = ALGORITHMS[algorithm](path)
    return {"bytes": size, algorithm: digest}


def _difference(path: Path, expected: Any) -> str | None:
    algorithm = next((name for name in ALGORITHMS if isinstance(expected, dict) and name in expected), None)
    if algorithm is None or not isinstance(written := expected.get("bytes"), int):
        return f"has no checksum in {IDENTITY}"
    try:
        actual = _checksum(path, algorithm)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if actual["bytes"] != written:
        return f"has {actual['bytes']:,} bytes, {written:,} were written"
    return None if actual == expected else "is not what was written: its checksum differs"


def _is_intact(checkpoint: Path) -> bool:
    try:
        return find_damage(checkpoint) is None
    except ConfigError:
        return False
