"""The engine's output on its way into the run folder's log: whole lines, without secrets; and the end of a log."""

import os
from collections.abc import Sequence
from pathlib import Path

from llmb.launch.secrets import scrub

LONGEST_LINE = 2**20  # bytes kept back while waiting for the end of a line
END = 2**18  # bytes searched for why a run ended


class Log:
    """Open from the engine's start to its last word."""

    def __init__(self, path: Path, secrets: Sequence[str]):
        self.path = path
        self.error: OSError | None = None  # why writing ended; the output is still taken in, or the engine would hang
        self._secrets = secrets
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._rest = b""

    def take(self, output: int) -> bool:
        """Move what there is to read; False at its end."""
        chunk = os.read(output, 65536)
        self._rest += chunk
        end = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r")) + 1
        if not end and len(self._rest) > LONGEST_LINE:
            end = self._rest.rfind(b" ") + 1 or len(self._rest)
        if not chunk:
            end = len(self._rest)
        lines, self._rest = self._rest[:end], self._rest[end:]
        if lines and self.error is None:
            self._write(os.fsencode(scrub(os.fsdecode(lines), self._secrets)))
        return bool(chunk)

    def _write(self, text: bytes) -> None:
        try:
            while text:
                text = text[os.write(self._file, text) :]
        except OSError as error:
            self.error = error


def end_of(path: Path) -> str:
    """The last that was written; nothing where it is not there, or where what kept it from being written still does."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END))
            return file.read(END).decode(errors="replace")
    except OSError:
        return ""
