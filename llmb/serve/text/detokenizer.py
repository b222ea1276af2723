"""Incremental detokenization of one output: text as soon as it is certain, never half a character.

    text = detokenizer.push(token)      # "" while the bytes of a character are incomplete
    text = detokenizer.finish()         # what is left at the end, incomplete bytes as U+FFFD

All texts of an output together are what decoding all its tokens at once gives.
"""

from codecs import getincrementaldecoder
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
MAX_PENDING_TOKENS = 8  # an incomplete character has fewer; text that is still invalid then stays so


class Detokenizer(Protocol):
    """Decoder of one output."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class TextTable:
    """Bytes of every token, and their text where the bytes are complete characters."""

    def __init__(self, token_bytes: list[bytes]):
        self.token_bytes = token_bytes
        self.texts = [_decode_whole(data) for data in token_bytes]


def _decode_whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class ByteLevelDetokenizer:
    """Decoder for vocabularies whose tokens are bytes."""

    __slots__ = ("_decoder", "_pending", "_table")

    def __init__(self, table: TextTable):
        self._table = table
        self._decoder: Any = None
        self._pending = False  # the decoder holds an incomplete character

    def push(self, token: int) -> str:
        if not self._pending and (text := self._table.texts[token]) is not None:
            return text
        if self._decoder is None:
            self._decoder = getincrementaldecoder("utf-8")("replace")
        decoded: str = self._decoder.decode(self._table.token_bytes[token])
        self._pending = bool(self._decoder.getstate()[0])
        return decoded

    def finish(self) -> str:
        text: str = self._decoder.decode(b"", True) if self._pending else ""
        self._pending = False
        return text


class DecodingDetokenizer:
    """Decoder for any tokenizer: decodes the last tokens with and without the new one; the difference is its text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._prefix = 0  # tokens before this index are not decoded any more
        self._read = 0  # the text of tokens before this index was returned

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._tokens) - self._read < MAX_PENDING_TOKENS:
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._prefix = self._read = len(self._tokens)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._tokens[self._prefix : self._read])
        return self._decode(self._tokens[self._prefix :])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
