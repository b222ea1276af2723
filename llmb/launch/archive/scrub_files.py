"""Files without secrets, piece by piece: what an archive does to every text file before it is packed."""

import getpass
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmb.errors import LaunchError
from llmb.launch.archive.scrub_json import scrub_json
from llmb.launch.archive.unpack import Progress
from llmb.launch.run_folder import shown
from llmb.launch.secrets import longest_first, scrub_thoroughly, secret_values, values_named_in

PIECE = 16 * 2**20  # bytes
LONGEST_KEY = 2**16  # bytes of a private key's block, which must not be cut in two
LOOKED_AT = 8192  # bytes that tell whether a file is text
NOBODY = "anonymous"


@dataclass(frozen=True)
class Scrubber:
    """What is known to be secret."""

    values: tuple[str, ...]  # longest first
    person: re.Pattern[str] | None = None  # home folders and the user's name in paths, where they are to go too

    @classmethod
    def knowing(
        cls, files: Iterable[Path], environ: Mapping[str, str], anonymous: bool, progress: Progress
    ) -> "Scrubber":
        """Knows the environment's secrets and those that one of the files names, as another may hold them unnamed."""
        values = set(secret_values(environ))
        for path in files:
            for piece in pieces(path):
                values |= values_named_in(_text(piece))
                progress(len(piece))
        return cls(tuple(longest_first(values)), _person() if anonymous else None)

    def scrub(self, text: str) -> str:
        if self.person is not None:
            text = self.person.sub(NOBODY, text)
        return scrub_thoroughly(text, self.values)

    def scrub_piece(self, content: bytes, suffix: str) -> bytes:
        """The same for what a file holds; bytes that are no UTF-8 stay as they are, and JSON stays JSON."""
        text = _text(content)
        clean = self.scrub(text)
        if clean != text and suffix == ".json":
            clean = scrub_json(text, self.scrub)
        elif clean != text and suffix == ".jsonl":
            clean = "\n".join(scrub_json(line, self.scrub) for line in text.split("\n"))
        return clean.encode("utf-8", "surrogateescape")


def is_text(path: Path) -> bool:
    """Whether secrets in a file can be seen: it has no zero byte near its beginning."""
    with _reading(path) as file:
        return b"\0" not in file.read(LOOKED_AT)


def pieces(path: Path) -> Iterator[bytes]:
    """A file's content, cut only between lines, and not within a private key."""
    with _reading(path) as file:
        rest = b""
        while read := file.read(PIECE):
            rest += read
            end = _cut(rest)
            if end:
                yield rest[:end]
                rest = rest[end:]
        if rest:
            yield rest


def _cut(content: bytes) -> int:
    end = content.rfind(b"\n") + 1
    begin = content.rfind(b"-----BEGIN ", max(0, end - LONGEST_KEY), end)
    if begin >= 0 and content.find(b"-----END ", begin, end) < 0:
        end = content.rfind(b"\n", 0, begin) + 1
    return end


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """A file opened to be read; trouble with it is said as one line that names it."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise LaunchError(f"cannot read {shown(path)}: {error.strerror}") from error


def _person() -> re.Pattern[str]:
    """Whoever's home it is in /home and /Users; this user's name and home wherever they stand as a folder."""
    names = []
    for ask in (getpass.getuser, lambda: Path.home().name):
        with suppress(KeyError, OSError, ImportError, RuntimeError):  # a user id without a name or a home
            names.append(re.escape(ask()))
    own = rf"|(?<=/)(?:{'|'.join(names)})(?![\w.-])" if all(names) and names else ""
    return re.compile(rf"(?<=/home/)[^/\s\"':,]+|(?<=/Users/)[^/\s\"':,]+{own}")
