"""Output without the control sequences of others: names, reasons and logs come from files that anybody may write.

    with safe_output(): print(reason)                         # "\\x1b]0;title\\x07" is shown as it is written here
    write_own(sys.stdout, colour(without_controls(reason)))   # what adds colours cleans the text before

No control character is passed on, not even a colour or a cursor movement: with those a log rewrites the lines above it.
Colours, progress rows and screens of our own go around that by `write_own`.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# A colour is left out, as nobody misses it in a log; all else but tab and newline is shown, carriage returns included.
_CONTROLS = re.compile(r"(?P<colour>\x1b\[[0-9;:]*m)|\r(?=\n)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    """Return text without colours and with every other control character spelled out."""
    return text if text.isprintable() else _CONTROLS.sub(_spelled_out, text)


def _spelled_out(match: re.Match[str]) -> str:
    if match["colour"] is not None or (match[0] == "\r" and match.string.startswith("\n", match.end())):
        return ""
    return match[0].encode("unicode_escape").decode()


def write_own(output: Any, text: str) -> None:
    """Write text with control sequences of our own, in which text of others is clean already."""
    getattr(output, "write_own", output.write)(text)
    output.flush()


class SafeStream:
    """Text stream that passes everything else on to the one it wraps."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text without control sequences."""
        self.write_own(without_controls(text))
        return len(text)

    def write_own(self, text: str) -> None:
        """Write text as it is; characters that the terminal's encoding lacks are spelled out."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Wrap stdout and stderr."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = SafeStream(sys.stdout), SafeStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
