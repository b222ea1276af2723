"""One-line progress of long work: redrawn on a terminal, printed now and then into a file."""

import sys
import time
from typing import TextIO

QUIET_S = 10.0  # between lines where nothing can be redrawn


class StatusLine:
    """Status line that may be drawn at any rate; `close` ends it."""

    def __init__(self, out: TextIO | None = None):
        self._out = out if out is not None else sys.stderr
        self._redraws = self._out.isatty()
        self._last_line = float("-inf")
        self._open = False

    def draw(self, text: str, force: bool = False) -> None:
        """Show the text; where nothing can be redrawn only now and then, unless forced."""
        if self._redraws:
            self._out.write(f"\r\x1b[2K{text}")
            self._open = True
        elif force or time.monotonic() - self._last_line >= QUIET_S:
            self._out.write(text + "\n")
            self._last_line = time.monotonic()
        self._out.flush()

    def close(self) -> None:
        if self._open:
            self._out.write("\n")
            self._out.flush()
            self._open = False
