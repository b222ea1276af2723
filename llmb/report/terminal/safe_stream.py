"""Output without the control sequences of others: names, reasons and logs come from files that anybody may write.

    with safe_output(): print(reason)       # "\\x1b]0;title\\x07" is shown as it is written here

Our own colours, progress lines and cursor movements pass: they are a short list, and none of them sets a title, writes
to the clipboard, switches the screen or hides text.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_COLOURS = r"\x1b\[(?:(?:0|[1-79]|2[2-79]|[349][0-79]|[34]8;5;\d{1,3}|10[0-7]);?)*m"
_PROGRESS = r"\x1b\[(?:\d{0,3}A|[0-2]?K|\?25[hl]|1G)"  # rich and StatusLine: cursor up, erase line, hide cursor
_CONTROLS = re.compile(rf"({_COLOURS}|{_PROGRESS})|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    """Return text with every other control character spelled out."""
    return text if text.isprintable() else _CONTROLS.sub(_spelled_out, text)


def _spelled_out(match: re.Match[str]) -> str:
    return match[1] or match[0].encode("unicode_escape").decode()


class SafeStream:
    """Text stream that passes everything else on to the one it wraps."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text without control sequences; characters that the terminal's encoding lacks are spelled out too."""
        safe = without_controls(text)
        try:
            self._stream.write(safe)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(safe.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

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
