"""Runs a function as another user of this machine, in a child process: only root can.

as_user("daemon", "users", function, umask=0o077)      # daemon, who is also in the group users
"""

import grp
import os
import pwd
import sys
import traceback
from collections.abc import Callable

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two other users")


def as_user(user: str, group: str | None, function: Callable[[], object], umask: int = 0o022) -> str:
    """Return what the function returned, as text; an exception is the text of its class and message.

    The child has the modules that this process has imported: another user may not be able to read their files.
    """
    account = pwd.getpwnam(user)
    groups = [account.pw_gid, *([grp.getgrnam(group).gr_gid] if group else [])]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setgroups(groups)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            os.umask(umask)
            os.environ["HOME"] = "/nonexistent"
            try:
                text = str(function())
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                text = f"{type(error).__name__}: {error}"
            os.write(writer, text.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read().decode()
    os.waitpid(child, 0)
    return text
