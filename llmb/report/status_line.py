"""One-line progress of long work: one row that is redrawn on a terminal, lines printed now and then into a file."""

import os
import shutil
import sys
import time
from typing import TextIO

from llmb.report.terminal.colour import shows_colour
from llmb.report.terminal.safe_stream import without_controls, write_own

QUIET_S = 10.0  # between lines where nothing can be redrawn
REDRAW_S = 0.1  # between rows: faster is only flicker
ERASE = "\r\x1b[J"  # the row of the cursor and all below


class StatusLine:
    """Status line that may be drawn at any rate; `close` ends it."""

    def __init__(self, out: TextIO | None = None):
        self._out = out if out is not None else sys.stderr
        self._redraws = self._out.isatty()
        self._last_line = float("-inf")
        self._last_row: tuple[str, float | None] | None = None  # drawn, or to be drawn before the line ends
        self._drawn_cells = 0  # of the row on the screen

    def draw(self, text: str, force: bool = False, fraction: float | None = None) -> None:
        """Show the text, with a bar if the fraction done is known; only now and then, unless forced."""
        now = time.monotonic()
        is_due = force or now - self._last_line >= (REDRAW_S if self._redraws else QUIET_S)
        if self._redraws:
            self._last_row = (text, fraction)
            if is_due:
                self._draw_row()
        elif is_due:
            self._out.write(text + "\n")
            self._out.flush()
        if is_due:
            self._last_line = now

    def _draw_row(self) -> None:
        from llmb.report.terminal.progress_row import progress_row

        assert self._last_row is not None
        width = self._width()
        text, fraction = self._last_row
        row = progress_row(without_controls(text), fraction, width, shows_colour(self._out))
        write_own(self._out, self._erasure(width) + row)
        self._drawn_cells = width - 1  # at most

    def _erasure(self, width: int) -> str:
        """Return what erases the row, which a terminal wraps when it becomes narrower."""
        wrapped = max(self._drawn_cells - 1, 0) // width
        return (f"\x1b[{wrapped}A" if wrapped else "") + ERASE

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns or shutil.get_terminal_size().columns
        except (OSError, ValueError):  # not a file, or no longer one
            return shutil.get_terminal_size().columns

    def erase(self) -> None:
        """Remove the row, so that something else can be printed in its place."""
        if self._drawn_cells:
            write_own(self._out, self._erasure(self._width()))
            self._drawn_cells, self._last_row = 0, None

    def close(self) -> None:
        """End the line with what was drawn last, so that what follows starts on a new one."""
        if self._last_row is not None:
            self._draw_row()
            self._out.write("\n")
            self._out.flush()
            self._drawn_cells, self._last_row = 0, None
