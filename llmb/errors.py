"""Every error a user may meet, as one tree; the exit code follows from the branch.

    LlmbError
      ConfigError      the request is wrong: exit 1
        UnknownName    a name that does not exist, with the names that do
      LaunchError      the system failed us: exit 2

An error's text is one line: what is wrong, and what would be right.
"""

from collections.abc import Iterable


class LlmbError(Exception):
    """The root: `except LlmbError` catches all that llmb raises on purpose."""

    exit_code = 1


class ConfigError(LlmbError):
    """The request is wrong and the user can put it right."""


class UnknownName(ConfigError):
    """A name that does not exist; lists those that do and the nearest one."""

    def __init__(self, kind: str, name: object, choices: Iterable[object]):
        from difflib import get_close_matches  # only a mistake has to wait for it

        listed = [str(c) for c in choices]
        near = get_close_matches(str(name), listed, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        super().__init__(f"unknown {kind} {str(name)!r}{hint}; choices are: {', '.join(listed) or 'none'}")


class LaunchError(LlmbError):
    """The system failed: a process would not start, the disk is full, a file vanished."""

    exit_code = 2
