"""Tokenizer of the served model: text to tokens, and the bytes or text of each token.

    tokenizer = load_tokenizer(config.model, weights_folder)
    tokenizer.encode("Once upon a time", add_special_tokens=True)
    detokenizer = tokenizer.detokenizer()        # of one output, see detokenizer.py

Weights without a tokenizer.json (random ones) get a byte-level fallback: a text becomes its UTF-8 bytes, one token
each; a token whose id is printable ASCII becomes that character, any other `<id>`, so that each has a text.
"""

import os
from pathlib import Path
from typing import Any, Protocol

from llmb.config.model import Model
from llmb.config.serialization import convert, read_json
from llmb.formats.tokenizer_file import read_tokenizer
from llmb.serve.benchmark.prompts import model_info
from llmb.serve.text.detokenizer import ByteLevelDetokenizer, DecodingDetokenizer, Detokenizer, TextTable

PRINTABLE = range(32, 127)


class TextTokenizer(Protocol):
    """Converts between text and tokens."""

    is_fallback: bool

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def detokenizer(self) -> Detokenizer:
        """Return the decoder of one output."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token by itself, special tokens included."""
        ...


class ByteFallbackTokenizer:
    """Tokenizer of weights that have none."""

    is_fallback = True

    def __init__(self, vocab: int):
        self._vocab = vocab
        texts = [chr(token) if token in PRINTABLE else f"<{token}>" for token in range(vocab)]
        self._table = TextTable([text.encode() for text in texts])

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [byte % self._vocab for byte in text.encode()]

    def detokenizer(self) -> Detokenizer:
        return ByteLevelDetokenizer(self._table)

    def token_bytes(self, token: int) -> bytes:
        return self._table.token_bytes[token]


class HfTokenizer:
    """Tokenizer of a tokenizer.json, by the package `tokenizers`."""

    is_fallback = False

    def __init__(self, tokenizer: Any, vocab: int):
        self._tokenizer = tokenizer
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._table: TextTable | None = None
        if _is_byte_level(tokenizer):
            pieces = [tokenizer.id_to_token(token) or "" for token in range(vocab)]
            self._bytes = [_byte_level_bytes(piece) for piece in pieces]
            self._table = TextTable([b"" if t in self._special else data for t, data in enumerate(self._bytes)])

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def detokenizer(self) -> Detokenizer:
        return DecodingDetokenizer(self._tokenizer) if self._table is None else ByteLevelDetokenizer(self._table)

    def token_bytes(self, token: int) -> bytes:
        if self._table is not None:
            return self._bytes[token]
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.encode()


def load_tokenizer(model: Model, weights: str | None) -> TextTokenizer:
    """Return the tokenizer of a weights folder, or the fallback where there is none."""
    file = Path(weights) / "tokenizer.json" if weights is not None else None
    if file is None or not file.is_file():
        return ByteFallbackTokenizer(model.vocab)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return HfTokenizer(read_tokenizer(file), model.vocab)


def eos_tokens(model: Model, weights: str | None) -> frozenset[int]:
    """Return the end-of-sequence tokens: config.json's, and those that generation_config.json adds."""
    eos = model_info(model, weights).eos
    file = Path(weights) / "generation_config.json" if weights is not None else None
    if file is None or not file.is_file():
        return eos
    where = f"{file}.eos_token_id"
    more = convert(dict[str, Any], read_json(file), str(file)).get("eos_token_id")
    return eos | frozenset(convert(tuple[int, ...], [more] if isinstance(more, int) else more or [], where))


def _is_byte_level(tokenizer: Any) -> bool:
    return type(tokenizer.decoder).__name__ == "ByteLevel"


def _byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a vocabulary entry, in which a character represents a byte; else it is plain text."""
    try:
        return bytes(CHARACTER_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode()


def _character_bytes() -> dict[str, int]:
    """Return the byte of each character as GPT-2's byte-level BPE writes them: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


CHARACTER_BYTES = _character_bytes()
