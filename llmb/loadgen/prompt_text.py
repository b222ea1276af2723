"""Texts of a given number of tokens, and the tokenizer that counts them.

    TextWriter(load_tokenizer(Path("llama"))).text(random, serial=7, tokens=1000)

Texts are common short English words, nearly all of which are one token with the space before them in the BPE
vocabularies of current models. So without a tokenizer a word counts as a token, and the server's usage tells the true
number; with one, words are removed and words of one token added until the count is exact.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

from llmb.errors import ConfigError
from llmb.formats.tokenizer_file import read_tokenizer

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning
reason research girl guy moment air teacher force education foot boy age policy music market sense nation plan
college interest death experience effect use class control care field development role effort rate heart drug
show leader light voice wife police mind price report decision son view relationship town road arm difference
value building action season society tax director position player record paper space ground form event official
matter center couple site project activity star table need court oil situation cost industry figure street image
phone data picture practice piece land product doctor wall patient worker news test movie north love support
technology step baby computer type attention film tree source organization look hair window evidence chance
"""
WORDS = tuple(_COMMON.split())
SERIAL_WORDS = 3  # at least: millions of texts differ for sure
MAX_ROUNDS = 20  # of corrections with a tokenizer


class TextWriter:
    """Writes texts of a number of tokens, with or without a tokenizer."""

    def __init__(self, tokenizer: Any = None):
        self._tokenizer = tokenizer

    def count(self, text: str, special: bool = True) -> int:
        """Return the tokens of a text, exact with a tokenizer, else its words; `special`: with begin-of-text."""
        if self._tokenizer is None:
            return len(text.split())
        return len(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def text(self, random: Random, tokens: int, serial: int | None = None, continued: bool = False) -> str:
        """Return a text of this many tokens; those with different serials differ from their first words on.

        `continued`: another text stands before it, which has the special tokens.
        """
        words = serial_words(serial, tokens) if serial is not None else []
        words += random.choices(WORDS, k=tokens - len(words))
        if self._tokenizer is None:
            return " ".join(words)
        for _ in range(MAX_ROUNDS):
            text = " ".join(words)
            counted = self.count(text, special=not continued)
            if counted == tokens:
                return text
            if counted < tokens:
                words = words + random.choices(self._fillers, k=tokens - counted)
            else:
                words = words[: int(len(words) * tokens / counted)] or random.choices(self._fillers)
        return " ".join(words)

    @cached_property
    def _fillers(self) -> Sequence[str]:
        """Words and letters of one token, which complete a text exactly whatever the vocabulary."""
        candidates = (*WORDS, *ascii_lowercase)
        return [word for word in candidates if self.count(f"{word} {word} {word}", special=False) == 3] or WORDS


def serial_words(serial: int, most: int) -> list[str]:
    """Return a number as words, lowest digits first, so that texts of neighbours differ from the first word on."""
    words: list[str] = []
    while len(words) < most and (serial or len(words) < SERIAL_WORDS):
        serial, digit = divmod(serial, len(WORDS))
        words.append(WORDS[digit])
    return words


def load_tokenizer(folder: Path) -> Any:
    """Load tokenizer.json of a folder in Hugging Face's layout."""
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; give a folder with tokenizer.json")
    return read_tokenizer(file)
