"""Token file: tokenized text to train on. Written by `llmb-run tokenize`, memory-mapped by engines.

    64 bytes   magic "LLMBTOKS", version, bytes per token (2 or 4), vocabulary, tokens, end-of-text token (-1: none)
    then       the tokens

Everything is little-endian. A vocabulary of up to 65,536 takes 2 bytes per token, a larger one 4. A readable header
means a complete file: the size is checked against it, and a file gets its name only when its last token is written.
"""

import os
import struct
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from llmb.config.serialization import create_new, open_regular_file, temporary_path
from llmb.errors import ConfigError, LaunchError

HEADER = struct.Struct("<8sIIQQq24x")
MAGIC = b"LLMBTOKS"
VERSION = 1
_NO_END_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class Header:
    """Header of a token file."""

    vocab: int  # vocabulary size
    tokens: int
    end: int | None = None  # end-of-text token; null: texts are not separated

    @property
    def token_bytes(self) -> int:
        return 2 if self.vocab <= 1 << 16 else 4

    def packed(self) -> bytes:
        end = _NO_END_TOKEN if self.end is None else self.end
        return HEADER.pack(MAGIC, VERSION, self.token_bytes, self.vocab, self.tokens, end)


def is_token_file(path: Path) -> bool:
    """Return whether a file has the magic number of a token file."""
    try:
        with open_regular_file(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """Read the header of a complete token file; raise a one-line error if it is invalid."""
    try:
        with open_regular_file(path) as file:
            head = file.read(HEADER.size)
            stored = file.seek(0, os.SEEK_END) - HEADER.size
    except OSError as error:
        raise ConfigError(f"cannot read token file {path}: {error.strerror}") from error
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ConfigError(f"{path} is not a token file; llmb-run tokenize makes one from text")
    _, version, token_bytes, vocab, tokens, end = HEADER.unpack(head)
    if version != VERSION:
        raise ConfigError(f"{path} is a token file of version {version}; this llmb reads version {VERSION}")
    header = Header(vocab=vocab, tokens=tokens, end=None if end == _NO_END_TOKEN else end)
    if token_bytes != header.token_bytes:
        raise ConfigError(f"{path}: {token_bytes} bytes per token do not match a vocabulary of {vocab}; tokenize again")
    if stored != tokens * token_bytes:
        problem = "is truncated" if stored < tokens * token_bytes else "has trailing bytes"
        raise ConfigError(f"{path} {problem}: its header says {tokens} tokens, {stored / token_bytes:g} are there")
    return header


class TokenWriter:
    """Incremental writer of a token file.

    with TokenWriter(Path("tokens.bin"), vocab=4096, end=0) as file:
        file.add([17, 4, 1000])
    """

    def __init__(self, path: Path, vocab: int, end: int | None = None):
        self.header = Header(vocab=vocab, tokens=0, end=end)
        self._path = path
        self._temporary = temporary_path(path)
        self._code = "H" if self.header.token_bytes == 2 else "I"

    def __enter__(self) -> "TokenWriter":
        try:
            self._file = open(create_new(self._temporary), "wb")
            self._file.write(self.header.packed())
        except OSError as error:
            raise LaunchError(f"cannot write {self._path}: {error.strerror}") from error
        return self

    def add(self, tokens: list[int]) -> None:
        """Append tokens."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.header.vocab:
            raise ConfigError(f"{self._path}: token {max(tokens)} is outside the vocabulary of {self.header.vocab}")
        packed = array(self._code, tokens)
        if sys.byteorder == "big":
            packed.byteswap()
        try:
            self._file.write(packed)
        except OSError as error:
            raise LaunchError(f"cannot write {self._path}: {error.strerror}") from error
        self.header = Header(vocab=self.header.vocab, tokens=self.header.tokens + len(tokens), end=self.header.end)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            with self._file:
                self._file.seek(0)
                self._file.write(self.header.packed())
            if kind is None:
                os.replace(self._temporary, self._path)
        except OSError as failure:
            if error is None:
                raise LaunchError(f"cannot write {self._path}: {failure.strerror}") from failure
        finally:
            self._temporary.unlink(missing_ok=True)
