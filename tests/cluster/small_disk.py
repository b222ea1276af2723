"""File system of some MiB that can be filled up, unmounted when its owner exits, even by kill -9."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

# The shell outlives its owner, whose exit closes the pipe that it reads from.
HOLD = 'mount -t tmpfs -o size="$2" tmpfs "$1" || exit 1; echo mounted; read -r _; umount --lazy "$1"'


class SmallDisk:
    """Context manager that mounts at `folder`; `mounted`: whether this machine permits it."""

    def __init__(self, folder: Path, size: str = "256m"):
        self.folder = folder
        self.mounted = False
        self._size = size

    def __enter__(self) -> "SmallDisk":
        command = ["bash", "-c", HOLD, "hold", str(self.folder), self._size]
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert self._holder.stdout is not None
        self.mounted = self._holder.stdout.readline() == b"mounted\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.communicate()
        self.mounted = False

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with suppress(OSError), self._filler.open("ab", buffering=0) as filler:
            while filler.write(bytes(65536)):
                pass
        assert os.statvfs(self.folder).f_bavail == 0

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"
