"""Command line of this process as `ps` shows it: secrets in it are overwritten.

    hide_arguments(["hunter2"])        # ps: llmb-run submit --env DB_PASS=*******

The kernel shows the memory that held the arguments when the process started; Python has copied them before. From the
start until this is called, some tenths of a second, they can be read; a variable of the shell that starts llmb-run
is never shown.
"""

from collections.abc import Iterable
from pathlib import Path

_ARG_START, _ARG_END = 45, 46  # fields of /proc/self/stat behind the name of the program


def hide_arguments(secrets: Iterable[str]) -> None:
    """Overwrite these texts wherever they stand in the command line; only Linux shows and allows it."""
    texts = [text.encode(errors="surrogateescape") for text in secrets if text]
    try:
        command_line = Path("/proc/self/cmdline").read_bytes()
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # a name may hold anything, blanks too
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    except (OSError, ValueError, IndexError):
        return
    if not start or end - start != len(command_line) or not any(text in command_line for text in texts):
        return
    import ctypes

    for text in texts:
        command_line = command_line.replace(text, b"*" * len(text))
    ctypes.memmove(start, command_line, len(command_line))
