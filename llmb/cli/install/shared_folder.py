"""`llmb-install --shared GROUP`: one $LLMB_INSTALL for all users of a group.

    share_folder(root, "hpc") -> ["shared with group hpc"]

Folders get the group and the setgid bit, so that whatever is created in them has the group too, and a default ACL, so
that the group may write it whatever the umask of its creator. Where a file system has no ACLs the umask decides:
002 shares, 022 does not. A private job.sh, of a run with --env, stays private.
"""

import grp
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from llmb.errors import ConfigError
from llmb.formats.folder_access import user_name

ACL_ATTRIBUTE = "system.posix_acl_default"
ACL_VERSION, USER_OBJECT, GROUP_OBJECT, OTHERS, NO_ID = 2, 0x01, 0x04, 0x20, 0xFFFFFFFF  # linux/posix_acl_xattr.h
GROUP_FOLDER = stat.S_ISGID | stat.S_IRWXG


def share_folder(root: Path, group: str) -> list[str]:
    """Share the folder and all in it with a group; return notes for the user."""
    gid = _group_id(group)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with_acl = _share(root, gid)
        others = {os.lstat(path).st_uid for path in _content(root) if not _share_entry(path, gid)}
    except OSError as error:
        raise ConfigError(f"cannot share {root} with group {group}: {error.strerror}{_advice(root, gid)}") from error
    notes = [f"{root} is shared with group {group}: each member sets LLMB_INSTALL={root}"]
    if not with_acl:
        notes.append("this file system has no default ACLs: each member also needs umask 002")
    if others:
        names = ", ".join(sorted(map(user_name, others)))
        notes.append(f"files of {names} stay as they are; they can share them by the same command")
    return notes


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        group_names = ", ".join(sorted(entry.gr_name for entry in grp.getgrall() if entry.gr_gid in _own_groups()))
        raise ConfigError(f"--shared: no group {group!r}; you are in: {group_names or 'none'}") from None


def _own_groups() -> set[int]:
    return {*os.getgroups(), os.getegid()}


def _advice(root: Path, gid: int) -> str:
    if os.geteuid() == 0:
        return ""
    if root.exists() and root.stat().st_uid != os.geteuid():
        return f"; it belongs to {user_name(root.stat().st_uid)}, who can"
    return "" if gid in _own_groups() else "; you are not in this group"


def _content(root: Path) -> Iterator[Path]:
    """Yield all files and folders below, without following links."""
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            if not path.is_symlink():
                yield path


def _share_entry(path: Path, gid: int) -> bool:
    """Share one file or folder; False: it belongs to another user, who alone may."""
    facts = os.lstat(path)
    if os.geteuid() not in (0, facts.st_uid):
        return facts.st_gid == gid and bool(facts.st_mode & stat.S_IWGRP)
    if stat.S_ISDIR(facts.st_mode):
        _share(path, gid)
    elif stat.S_ISREG(facts.st_mode) and not (path.name == "job.sh" and not facts.st_mode & 0o077):
        os.chown(path, -1, gid, follow_symlinks=False)
        executable = stat.S_IXGRP if facts.st_mode & stat.S_IXUSR else 0
        path.chmod(stat.S_IMODE(facts.st_mode) | stat.S_IRGRP | stat.S_IWGRP | executable)
    return True


def _share(folder: Path, gid: int) -> bool:
    """Share one folder; return whether the file system has default ACLs."""
    os.chown(folder, -1, gid)
    mode = stat.S_IMODE(folder.stat().st_mode)
    folder.chmod(mode | GROUP_FOLDER)
    entries = ((USER_OBJECT, 7), (GROUP_OBJECT, 7), (OTHERS, mode & 7))
    acl = struct.pack("<I", ACL_VERSION) + b"".join(struct.pack("<HHI", tag, bits, NO_ID) for tag, bits in entries)
    try:
        os.setxattr(folder, ACL_ATTRIBUTE, acl)
    except OSError:
        return False
    return True
