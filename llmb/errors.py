"""Exceptions that llmb raises for users; the branch of the tree determines the exit code.

    LlmbError
      ConfigError      wrong request: exit 1
        UnknownName    unknown name, with the valid choices
      LaunchError      system failure: exit 2

A message is one line: what is wrong, and what would be valid.
"""

from collections.abc import Iterable

SIMILAR = 0.65  # of a name, to be suggested: isl for ils, not timing for nothing
MOST_AT_FRONT, MOST_AT_END = 3000, 1000  # characters of a message: it may quote a value of megabytes


class LlmbError(Exception):
    """Base class: `except LlmbError` catches everything that llmb raises on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        message = super().__str__()
        if len(message) <= MOST_AT_FRONT + MOST_AT_END:
            return message
        return f"{message[:MOST_AT_FRONT]} ... {message[-MOST_AT_END:]}"


class ConfigError(LlmbError):
    """Wrong request, which the user can correct."""


class UnknownName(ConfigError):
    """Unknown name; the message lists the valid ones and suggests the nearest."""

    def __init__(self, kind: str, name: object, choices: Iterable[object], suggestion: str | None = None):
        from difflib import get_close_matches  # imported here: only an error pays for it

        listed = [str(c) for c in choices]
        nearest = [suggestion] if suggestion else get_close_matches(str(name), listed, n=1, cutoff=SIMILAR)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        super().__init__(f"unknown {kind} {str(name)!r}{hint}; choices are: {', '.join(listed) or 'none'}")


class LaunchError(LlmbError):
    """System failure: a process did not start, the disk is full, a file disappeared.

    `failed_rank`: the rank that failed, where another one raises the error too; none: the one that raises it.
    """

    exit_code = 2

    def __init__(self, message: str, failed_rank: int | None = None):
        super().__init__(message)
        self.failed_rank = failed_rank
