"""Colours of verdicts, statuses and warnings, on a terminal only: the text itself is the same everywhere.

    print_coloured(summary(result))

NO_COLOR (no-color.org) and TERM=dumb leave colours out; then Rich is not imported.
"""

import os
import re
import sys
from typing import TextIO

GOOD, DOUBTFUL, BAD, MINOR = "green", "yellow", "red", "dim"
RULES = tuple(
    (re.compile(pattern, re.MULTILINE), style)
    for pattern, style in (
        (r"^\S+: (?P<word>ok)(?=$| \()", GOOD),
        (r"^\S+: (?P<word>(failed|oom|timeout|incomplete|diverged)\b.*)$", BAD),
        (r"^(?P<word>warning [A-Z_]+):", DOUBTFUL),
        (r"^(?P<word>note [A-Z_]+:.*)$", MINOR),
        (r"^verdict: (?P<word>.*)$", "bold"),
        (r"^verdict: (?!too few).*?(?P<word>faster|more output tokens/s)(?! \(too few)", GOOD),
        (r"^verdict: (?!too few).*?(?P<word>slower|fewer output tokens/s)(?! \(too few)", BAD),
        (r"(?<=^verdict: )(?P<word>too few samples to tell|no difference)", DOUBTFUL),
        (r"(?P<word>\(too few requests to tell\))", DOUBTFUL),
        (r"^(?P<word>possible):", GOOD),
        (r"^(?P<word>IMPOSSIBLE)\b", BAD),
        (r"^ *(?P<word>ok)  ", GOOD),  # the levels of doctor
        (r"^ *(?P<word>warning)  ", DOUBTFUL),
        (r"^ *(?P<word>problem)  ", BAD),
        (r"^(?P<word>differs)  ", DOUBTFUL),
    )
)


def shows_colour(output: TextIO) -> bool:
    """Return whether colours are wanted there."""
    return output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_coloured(text: str, output: TextIO | None = None) -> None:
    """Print a report; on a terminal with its verdict, status and warnings in colour."""
    output = sys.stdout if output is None else output
    if not shows_colour(output):
        print(text, file=output)
        return
    from rich.console import Console
    from rich.text import Text

    coloured = Text(text)
    for pattern, style in RULES:
        for match in pattern.finditer(text):
            coloured.stylize(style, *match.span("word"))
    Console(file=output, force_terminal=True, soft_wrap=True, highlight=False).print(coloured)
