"""Colours of verdicts, statuses and warnings, on a terminal only: the words are the same everywhere.

    print_report(summary(result))

NO_COLOR (no-color.org) and TERM=dumb leave colours out; then Rich is not imported.
"""

import os
import re
import sys
from typing import TYPE_CHECKING, TextIO

from llmb.report.table import terminal_width
from llmb.report.terminal.folding import INDENT, fold, fold_offsets
from llmb.report.terminal.safe_stream import without_controls, write_own

if TYPE_CHECKING:
    from rich.text import Text

GOOD, DOUBTFUL, BAD, MINOR = "green", "yellow", "red", "dim"
CELL_END = r"(?=  |$)"
RULES = tuple(
    (re.compile(pattern, re.MULTILINE), style)
    for pattern, style in (
        (r"^(\S+:|job \S+,) (?P<word>ok)(?=$| \()", GOOD),
        (r"^(\S+:|job \S+,) (?P<word>(failed|oom|timeout|incomplete|diverged|lost)\b.*)$", BAD),
        (r"^(?P<word>warning [A-Z_]+):", DOUBTFUL),
        (r"^(?P<word>note [A-Z_]+:.*)$", MINOR),
        (r"^verdict: (?P<word>.*)$", "bold"),
        (r"^verdict: (?!too few).*?(?P<word>faster|more output tokens/s)(?! \(too few)", GOOD),
        (r"^verdict: (?!too few).*?(?P<word>slower|fewer output tokens/s)(?! \(too few)", BAD),
        (r"(?<=^verdict: )(?P<word>too few samples to tell|no difference)", DOUBTFUL),
        (r"(?P<word>\(too few requests to tell\))", DOUBTFUL),
        (r"^(?P<word>ok|possible):", GOOD),
        (r"^(?P<word>slower):", BAD),
        (r"^(?P<word>undecided):", DOUBTFUL),
        (r"^(?P<word>pass) ", GOOD),  # a row of exemplar
        (r"^(?P<word>FAIL) ", BAD),
        (rf"(?<=  )(?P<word>ok){CELL_END}", GOOD),  # a status in a table of jobs
        (rf"(?<=  )(?P<word>failed|oom|timeout|incomplete|diverged|lost){CELL_END}", BAD),
        (rf"(?<=  )(?P<word>running){CELL_END}", "bold"),
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


def print_report(text: str, output: TextIO | None = None) -> None:
    """Print a report; on a terminal within its width, with verdict, status and warnings in colour."""
    output = sys.stdout if output is None else output
    write_own(output, coloured(text, output) + "\n")


def coloured(text: str, output: TextIO) -> str:
    """Return a report as it is printed there: within the terminal's width, with escape codes where it shows colours.

    No others are left in it: the text may quote names and logs.
    """
    text, width = without_controls(text), terminal_width()
    if not shows_colour(output):
        return fold(text, width)
    from rich.console import Console

    console = Console(file=output, force_terminal=True, soft_wrap=True, highlight=False)
    with console.capture() as capture:
        console.print(styled(text, width), end="")
    return capture.get()


def styled(text: str, width: int | None) -> "Text":
    """Return a report with its colours and line breaks, for a console of Rich."""
    from rich.text import Text

    report = Text(text)
    for pattern, style in RULES:
        for match in pattern.finditer(text):
            report.stylize(style, *match.span("word"))
    first, *others = report.divide(fold_offsets(text, width))
    return Text(f"\n{INDENT}").join([first, *(line[1:] for line in others)])  # without the space that was broken at
