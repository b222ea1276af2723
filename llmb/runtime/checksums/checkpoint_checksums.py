"""Checksums of the files of a checkpoint: written with it, checked while it is loaded.

    files = checksums(paths)                         # when they are on disk; `commit` records them
    checking = CheckpointCheck(checkpoint)
    checking.begin(streamed=names)                   # reads all other files in a thread, beside the load
    with checking.stream(name) as stream: ...        # a file that is loaded anyhow: the loaded bytes are those checked
    checking.damage()                                # waits; None: every file is as it was written

`file_checksum.py` says which damage a checksum detects. Checkpoints of older versions have another checksum of each
file, or none.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmb.errors import ConfigError
from llmb.runtime.checkpoint_folder import IDENTITY, FileChecksums, checkpoint_step, complete_checkpoints, read_identity
from llmb.runtime.checksums.file_checksum import ALGORITHM, ALGORITHMS, FileChecksum
from llmb.runtime.checksums.file_stream import FileStream, file_checksum


def checksums(paths: Iterable[Path]) -> FileChecksums:
    """Return size and checksum of each file by its name."""
    return {path.name: _record(ALGORITHM, file_checksum(path, ALGORITHM)) for path in paths}


def find_damage(checkpoint: Path) -> str | None:
    """Return what is wrong with the first bad file of a checkpoint; None: nothing, or nothing is recorded."""
    return CheckpointCheck(checkpoint).damage()


def damaged_error(checkpoint: Path, damage: str) -> ConfigError:
    """Return the error of a damaged checkpoint, which offers the newest older one that is not."""
    return ConfigError(f"resume: {checkpoint} is damaged: {damage}; {older_offer(checkpoint)}")


def older_offer(checkpoint: Path) -> str:
    """Return in words which older checkpoint is the newest intact one."""
    older = [
        path for path in complete_checkpoints(checkpoint.parent) if checkpoint_step(path) < checkpoint_step(checkpoint)
    ]
    intact = next((path for path in reversed(older) if _is_intact(path)), None)
    return "no older one is intact" if intact is None else f"resume={intact} continues from an older one"


class CheckpointCheck:
    """A check of a checkpoint's files; of several ranks each checks a part of them."""

    def __init__(self, checkpoint: Path, part: int = 0, parts: int = 1):
        self._checkpoint = checkpoint
        self._damage: dict[str, str] = {}  # by file
        recorded = read_identity(checkpoint).get("files", {})
        if not isinstance(recorded, dict):
            self._damage[IDENTITY], recorded = "has no list of files", {}
        special = next((name for name in sorted(recorded) if _is_special(checkpoint / name)), None)
        if special is not None:  # opening a FIFO would wait for ever
            raise damaged_error(checkpoint, f"{special} is not a regular file")
        self._unchecked: dict[str, Any] = {  # what is recorded of each
            name: recorded[name] for name in sorted(recorded) if _rank(name) % parts == part
        }
        self._others: Future[None] | None = None

    def is_streamable(self, name: str) -> bool:
        """Return whether a file is to be checked here, and has a checksum that can be computed while it is loaded."""
        return _algorithm(self._unchecked.get(name)) is not None

    def begin(self, streamed: Collection[str] = ()) -> None:
        """Start to check files in a thread, all but those that will be streamed."""
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums")
        self._others = executor.submit(self._check, [name for name in self._unchecked if name not in streamed])
        executor.shutdown(wait=False)  # ends with the check

    @contextmanager
    def stream(self, name: str) -> Iterator[FileStream]:
        """Open a file to load it; it is checked to its end, whether or not the load succeeds."""
        recorded = self._unchecked.pop(name)
        algorithm = _algorithm(recorded)
        assert algorithm is not None, f"{name} is not streamable"
        try:
            with FileStream(self._checkpoint / name, algorithm) as stream:
                try:
                    yield stream
                finally:
                    self._compare(name, recorded, _record(algorithm, stream.checksum()))
        except OSError as error:
            self._damage.setdefault(name, f"cannot be read: {error.strerror}")
            raise

    def damage(self) -> str | None:
        """Finish the check of all files and return what is wrong with the first bad one."""
        if self._others is not None:
            self._others.result()
        self._check([*self._unchecked])
        return next((f"{name} {self._damage[name]}" for name in sorted(self._damage)), None)

    def _check(self, names: Collection[str]) -> None:
        for name in names:
            recorded = self._unchecked.pop(name)
            algorithm = _algorithm(recorded)
            if algorithm is None:
                self._damage[name] = f"has no checksum in {IDENTITY}"
                continue
            try:
                self._compare(name, recorded, _record(algorithm, file_checksum(self._checkpoint / name, algorithm)))
            except OSError as error:
                self._damage[name] = f"cannot be read: {error.strerror}"

    def _compare(self, name: str, recorded: dict[str, int], actual: dict[str, int]) -> None:
        if actual["bytes"] != recorded["bytes"]:
            self._damage[name] = f"has {actual['bytes']:,} bytes, {recorded['bytes']:,} were written"
        elif actual != recorded:
            self._damage[name] = "is not what was written: its checksum differs"


def _record(algorithm: str, checksum: FileChecksum) -> dict[str, int]:
    return {"bytes": checksum.bytes, algorithm: checksum.digest}


def _algorithm(recorded: Any) -> str | None:
    """Return the name of the checksum that is recorded of a file, if it is a complete record."""
    if not isinstance(recorded, dict) or not isinstance(recorded.get("bytes"), int):
        return None
    return next((name for name in ALGORITHMS if name in recorded), None)


def _rank(name: str) -> int:
    """Return the rank that wrote a file, `__2_0.distcp`: in the same layout it loads it, so it checks it."""
    match = re.match(r"__([0-9]{1,9})_", name)
    return int(match[1]) if match else 0


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _is_intact(checkpoint: Path) -> bool:
    try:
        return find_damage(checkpoint) is None
    except ConfigError:
        return False
