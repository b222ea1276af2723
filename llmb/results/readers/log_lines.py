"""Clean lines of log files, whatever a terminal, a pipe or a crash did to them.

A carriage return ends a line as a newline does (progress bars), colours and control characters are removed,
undecodable bytes are replaced, an endless line is cut, and the rank prefix of a launcher (`[rank3]:`,
`3: `, `[7] `) is read off. Everything streams: memory does not grow with the file.

Lines of an NCCL trace, of which a training log may hold millions, are skipped: `nccl_log.py` reads those.

    for line in clean(file_lines(path)): print(line.rank, line.text)
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from llmb.errors import ConfigError
from llmb.formats.dense_reader import BLOCK_BYTES, open_dense

LINE_BYTES = 64 << 10  # the rest of a longer line is passed over
TAIL_BYTES = 64 << 10

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))?")
_RAW_ESCAPES = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))?")
_CONTROLS = {code: None for code in (*range(32), 127) if chr(code) != "\t"}
_RANK = re.compile(r"\[[a-z]{1,12}(\d{1,6})\]:\s?|\s{0,6}(\d{1,6}): |\[(\d{1,6})\] ")
_TRACE, _BAR = b"NCCL INFO ", b"|"  # a bar in the same line: a step's line was written into the trace's
_WORD_ENDS = b" \t|=:"


class Line(NamedTuple):
    """One clean line and the rank that wrote it; 0 if none is named."""

    rank: int
    text: str


def open_log(path: Path) -> BufferedReader:
    """Open a log for reading without its holes, or raise one clear line."""
    try:
        return open_dense(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


class LogFile:
    """Raw lines of a file, all of them or those that a reader needs.

    The last word of an unfinished line is left out: half a number is another number. Escape sequences and NUL bytes
    are removed, so that they hide no word.
    """

    def __init__(self, path: Path, tail_bytes: int | None = None):
        self.path = path
        self.tail_bytes = tail_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yield every line."""
        return self.having((), lambda: True)

    def having(self, words: Collection[bytes], every_line: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the lines that contain one of these words, and those that follow while `every_line` returns true.

        A block is searched as a whole, which takes a hundredth of the time of looking at each of its lines.
        """
        with open_log(self.path) as log:
            if self.tail_bytes is not None:
                log.seek(max(0, os.fstat(log.fileno()).st_size - self.tail_bytes))
            for block in _blocks(log):
                for line in _lines(block, words, every_line):
                    if _TRACE not in line or _BAR in line:
                        yield line[:LINE_BYTES]


def file_lines(path: Path) -> LogFile:
    """Return the raw lines of a file."""
    return LogFile(path)


def tail_lines(path: Path) -> LogFile:
    """Return the raw lines of the end of a file."""
    return LogFile(path, TAIL_BYTES)


def _blocks(log: BufferedReader) -> Iterator[bytes]:
    """Yield blocks of whole lines; each ends with a newline."""
    remainder, overlong = b"", False
    while block := log.read(BLOCK_BYTES):
        block = (remainder + block.replace(b"\0", b"")).replace(b"\r", b"\n")
        begin, end = 0, block.rfind(b"\n") + 1
        if overlong and end:  # the end of the long line
            begin, overlong = block.find(b"\n") + 1, False
        remainder = block[end:]
        if begin < end:
            yield _without_escapes(block[begin:end])
        if len(remainder) > LINE_BYTES or overlong:
            if not overlong:
                yield _without_escapes(remainder[:LINE_BYTES] + b"\n")
            remainder, overlong = b"", True
    if whole_words := remainder[: max(map(remainder.rfind, _WORD_ENDS)) + 1]:
        yield _without_escapes(whole_words + b"\n")


def _without_escapes(block: bytes) -> bytes:
    return _RAW_ESCAPES.sub(b"", block) if b"\x1b" in block else block


def _lines(block: bytes, words: Collection[bytes], every_line: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the lines of a block that contain one of these words, in order, and others while `every_line` says so."""
    ends: dict[int, int] = {}  # start of a line -> its end
    for word in words:
        place = block.find(word)
        while place >= 0:
            end = block.find(b"\n", place)
            ends[block.rfind(b"\n", 0, place) + 1] = end
            place = block.find(word, end)
    position = 0
    for start in (*sorted(ends), len(block)):
        while position < start and every_line():
            end = block.find(b"\n", position)
            yield block[position:end]
            position = end + 1
        if position <= start < len(block):
            yield block[start : ends[start]]
            position = ends[start] + 1


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
