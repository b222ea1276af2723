"""Clean lines of log files, whatever a terminal, a pipe or a crash did to them.

A carriage return ends a line as a newline does (progress bars), colours and control characters are removed,
undecodable bytes are replaced, an endless line is cut, and the rank prefix of a launcher (`[rank3]:`,
`3: `, `[7] `) is read off. Everything streams: memory does not grow with the file.

Lines of an NCCL trace, of which a training log may hold millions, are skipped: `nccl_log.py` reads those.

    for line in clean(file_lines(path)): print(line.rank, line.text)
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from llmb.config.serialization import open_regular_file
from llmb.errors import ConfigError

BLOCK_BYTES = 256 << 10
LINE_BYTES = 64 << 10  # the rest of a longer line is passed over
TAIL_BYTES = 64 << 10

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))?")
_CONTROLS = {code: None for code in (*range(32), 127) if chr(code) != "\t"}
_RANK = re.compile(r"\[[a-z]{1,12}(\d{1,6})\]:\s?|\s{0,6}(\d{1,6}): |\[(\d{1,6})\] ")
_TRACE, _BAR = b"NCCL INFO ", b"|"  # a bar in the same line: a step's line was written into the trace's
_WORD_ENDS = b" \t|=:"


class Line(NamedTuple):
    """One clean line and the rank that wrote it; 0 if none is named."""

    rank: int
    text: str


def open_log(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a log for reading, or raise one clear line."""
    try:
        return open_regular_file(path, buffering)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def file_lines(path: Path) -> Iterator[bytes]:
    """Yield the raw lines of a file, without the last word of an unfinished line: half a number is another number."""
    with open_log(path) as log:
        yield from _split(log)


def tail_lines(path: Path) -> Iterator[bytes]:
    """Yield the raw lines of the end of a file."""
    with open_log(path) as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
        yield from _split(log)


def _split(log: BinaryIO) -> Iterator[bytes]:
    remainder, overlong = b"", False
    while block := log.read(BLOCK_BYTES):
        lines = (remainder + block).replace(b"\r", b"\n").split(b"\n")
        if overlong and len(lines) > 1:  # the end of the long line
            del lines[0]
            overlong = False
        remainder = lines.pop()
        for line in lines:
            if _TRACE not in line or _BAR in line:
                yield line[:LINE_BYTES]
        if len(remainder) > LINE_BYTES or overlong:
            if not overlong:
                yield remainder[:LINE_BYTES]
            remainder, overlong = b"", True
    if remainder:
        yield remainder[: max(map(remainder.rfind, _WORD_ENDS)) + 1]


def clean(lines: Iterable[bytes | str]) -> Iterator[Line]:
    """Yield lines as text without terminal codes, each with its rank; skip blank ones."""
    for raw in lines:
        text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
        for part in text.split("\r") if "\r" in text else (text,):
            part = part.rstrip("\n")
            if not part.isprintable():
                part = _ESCAPES.sub("", part).translate(_CONTROLS)
            line = _without_rank(part)
            if line.text and not line.text.isspace():
                yield line


def _without_rank(text: str) -> Line:
    rank: int | None = None
    for _ in range(2):  # a launcher's label may stand before the engine's own; the first names the process
        if match := _RANK.match(text):
            rank = int(match[match.lastindex or 0]) if rank is None else rank
            text = text[match.end() :]
    return Line(rank or 0, text)
