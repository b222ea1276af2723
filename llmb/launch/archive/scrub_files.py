"""Scrub secrets from text files, chunk by chunk, before they are packed into an archive."""

import getpass
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llmb.errors import LaunchError
from llmb.events import MAX_LINE_BYTES
from llmb.launch.archive.unpack import ByteProgress
from llmb.launch.run_folder import printable_path
from llmb.launch.secrets import MASK, is_named_secret, longest_first, scrub_thoroughly, secret_values, values_named_in

CHUNK_BYTES = 16 * 2**20
MAX_KEY_BYTES = 2**16  # of a private key, which must not be split over two chunks
TEXT_PROBE_BYTES = 8192
ANONYMOUS = "anonymous"

TextScrubber = Callable[[str], str]


@dataclass(frozen=True)
class Scrubber:
    """Secret values and patterns to remove."""

    values: tuple[str, ...]  # longest first
    user_pattern: re.Pattern[str] | None = None  # home folders and the user's name in paths; None: they stay

    @classmethod
    def from_files(
        cls, files: Iterable[Path], environ: Mapping[str, str], anonymous: bool, progress: ByteProgress
    ) -> "Scrubber":
        """Collect the environment's secrets and those named in one of the files, as another may hold them unnamed."""
        values = set(secret_values(environ))
        for path in files:
            for chunk in read_chunks(path):
                values |= values_named_in(_decode(chunk))
                progress(len(chunk))
        return cls(tuple(longest_first(values)), _user_pattern() if anonymous else None)

    def scrub(self, text: str) -> str:
        """Return text without secrets."""
        if self.user_pattern is not None:
            text = self.user_pattern.sub(ANONYMOUS, text)
        return scrub_thoroughly(text, self.values)

    def scrub_chunk(self, content: bytes, suffix: str) -> bytes:
        """Return a chunk of a file without secrets; bytes that are not UTF-8 stay as they are, and JSON stays valid."""
        text = _decode(content)
        clean = self.scrub(text)
        if clean != text and suffix == ".json":
            clean = scrub_json(text, self.scrub)
        elif clean != text and suffix == ".jsonl":
            clean = "\n".join(scrub_json(line, self.scrub) for line in text.split("\n"))
        return clean.encode("utf-8", "surrogateescape")


def scrub_json(text: str, scrub: TextScrubber) -> str:
    """Scrub JSON as text, which keeps its layout; where a mask breaks its quoting, value by value instead."""
    while (clean := scrub(text)) != text:
        if not _is_json(text) or _is_json(clean):
            return clean
        end = "\n" if text.endswith("\n") else ""
        by_value = json.dumps(_scrub_value(json.loads(text), scrub)) + end
        if by_value == text:
            break
        text = by_value
    return text


def _scrub_value(value: Any, scrub: TextScrubber) -> Any:
    if isinstance(value, dict):
        return {
            scrub(name): MASK if _is_secret(name, item) else _scrub_value(item, scrub) for name, item in value.items()
        }
    if isinstance(value, list):
        return [_scrub_value(item, scrub) for item in value]
    return scrub(value) if isinstance(value, str) else value


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str | int | float) and is_named_secret(name, str(value))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_text(path: Path) -> bool:
    """Return whether a file is text, so that it can be scrubbed: no zero byte near its beginning, no endless line."""
    with _open(path) as file:
        return b"\0" not in file.read(TEXT_PROBE_BYTES) and _has_short_lines(file)


def _has_short_lines(file: BinaryIO) -> bool:
    """Return whether the lines of a file can be held in memory; of a large file only the ends of lines are read."""
    start, size = 0, file.seek(0, os.SEEK_END)
    while size - start > MAX_LINE_BYTES:
        for place in range(start + MAX_LINE_BYTES, start, -TEXT_PROBE_BYTES):
            file.seek(place - TEXT_PROBE_BYTES)
            end = file.read(TEXT_PROBE_BYTES).rfind(b"\n") + 1
            if end and place - TEXT_PROBE_BYTES + end > start:
                start = place - TEXT_PROBE_BYTES + end
                break
        else:
            return False
    return True


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's content, split only between lines, and not within a private key."""
    with _open(path) as file:
        buffer = b""
        while data := file.read(CHUNK_BYTES):
            buffer += data
            end = _chunk_end(buffer)
            if end:
                yield buffer[:end]
                buffer = buffer[end:]
        if buffer:
            yield buffer


def _chunk_end(content: bytes) -> int:
    end = content.rfind(b"\n") + 1
    begin = content.rfind(b"-----BEGIN ", max(0, end - MAX_KEY_BYTES), end)
    if begin >= 0 and content.find(b"-----END ", begin, end) < 0:
        end = content.rfind(b"\n", 0, begin) + 1
    return end


def _decode(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; errors name it."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise LaunchError(f"cannot read {printable_path(path)}: {error.strerror}") from error


def _user_pattern() -> re.Pattern[str]:
    """Match any user in /home and /Users, and this user's name and home wherever they are a path component."""
    names = []
    for lookup in (getpass.getuser, lambda: Path.home().name):
        with suppress(KeyError, OSError, ImportError, RuntimeError):  # a user id without a name or a home
            names.append(re.escape(lookup()))
    this_user = rf"|(?<=/)(?:{'|'.join(names)})(?![\w.-])" if all(names) and names else ""
    return re.compile(rf"(?<=/home/)[^/\s\"':,]+|(?<=/Users/)[^/\s\"':,]+{this_user}")
