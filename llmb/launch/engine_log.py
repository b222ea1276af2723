"""Log of an engine in the run folder: written in whole lines, without secrets; and its tail."""

import os
from collections.abc import Sequence
from pathlib import Path

from llmb.config.serialization import open_regular_file
from llmb.launch.secrets import scrub

MAX_LINE_BYTES = 2**20  # held back while waiting for the end of a line
TAIL_BYTES = 2**18  # searched for why a run ended


class EngineLog:
    """Log file, open from the engine's start to the end of its output."""

    def __init__(self, path: Path, secrets: Sequence[str]):
        self.path = path
        self.error: OSError | None = None  # why writing stopped; output is still read, or the engine would block
        self._secrets = secrets
        self._file = open_log(path)
        self._partial_line = b""

    def copy_from(self, output: int) -> bool:
        """Copy available output of a pipe to the log; False at its end."""
        chunk = os.read(output, 65536)
        data = self._partial_line + chunk
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > MAX_LINE_BYTES:
            end = data.rfind(b" ") + 1 or len(data)
        if not chunk:
            end = len(data)
        lines, self._partial_line = data[:end], data[end:]
        if lines and self.error is None:
            self._write(os.fsencode(scrub(os.fsdecode(lines), self._secrets)))
        return bool(chunk)

    def _write(self, text: bytes) -> None:
        try:
            while text:
                text = text[os.write(self._file, text) :]
        except OSError as error:
            self.error = error


def open_log(path: Path) -> int:
    """Open a log to append to and return its descriptor; a link under its name, which anyone can plant, is an error."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def read_log_tail(path: Path) -> str:
    """Return the end of a log; empty where it is missing or cannot be read."""
    try:
        with open_regular_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
