"""Access to a folder that several users share, and one line that says why this user may not write to it.

is_own(path)                  # of this user; an installation may hold runs of others
write_hint(path)              # "... belongs to alice, who can share it: llmb-install --shared GROUP"
"""

import grp
import os
import pwd
from pathlib import Path


def is_own(path: Path) -> bool:
    """Return whether a path belongs to this user, or is gone."""
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return True


def write_hint(path: Path) -> str:
    """Return what to do about a path that this user may not write: of another user's folder, who can share it."""
    own_choice = "choose a folder you can write to: LLMB_INSTALL=/folder"
    blocking = _blocking_folder(path)
    if blocking is None or blocking.stat().st_uid in (os.geteuid(), 0):
        return own_choice
    facts = blocking.stat()
    group = f"group {group_name(facts.st_gid)} {'may' if facts.st_mode & 0o020 else 'may not'} write there"
    sharing = f"{blocking} belongs to {user_name(facts.st_uid)}, {group}; share it by llmb-install --shared GROUP"
    return f"{sharing}, or {own_choice}"


def owner(path: Path) -> str:
    """Return the name of the user to whom a path belongs."""
    return user_name(path.stat().st_uid)


def user_name(uid: int) -> str:
    """Return the name of a user, or the number where no name is known."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return the name of a group, or the number where no name is known."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _blocking_folder(path: Path) -> Path | None:
    """Return the path itself or the nearest folder above that exists, where this user may not write there."""
    for candidate in (path, *path.parents):
        try:
            candidate.stat()
        except FileNotFoundError:
            continue
        except OSError:  # a folder above may not be entered
            continue
        return None if os.access(candidate, os.W_OK, effective_ids=True) else candidate
    return None
