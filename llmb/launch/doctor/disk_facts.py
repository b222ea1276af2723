"""Facts of the disk that stores runs: free space, file system, whether it can be written."""

import os
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """The file system of one folder. Null: unknown."""

    path: str
    filesystem: str | None = None  # ext4, nfs4, lustre, tmpfs
    free_bytes: int | None = None  # for this user
    total_bytes: int | None = None
    writable: bool = False  # the folder, or the first of its parents that exists


def disk_facts(folder: Path) -> DiskFacts:
    """Return the facts of a folder that need not exist yet."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        status = os.statvfs(existing)
    except OSError:
        return DiskFacts(path=str(folder))
    return DiskFacts(
        path=str(folder),
        filesystem=filesystem_of(existing.resolve()),
        free_bytes=status.f_bavail * status.f_frsize,
        total_bytes=status.f_blocks * status.f_frsize,
        writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
    )


def filesystem_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the file system that a path is on: of the longest mount point above it, the last mounted."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    best: tuple[int, str | None] = (-1, None)
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= best[0]:
            best = len(point), fields[2]
    return best[1]
