"""Makes kjv.txt and tokenizer.json beside it; needs Debian's package bible-kjv and the library tokenizers.

    python data/make.py

Both are deterministic: the same package gives the same text, and the same text the same tokenizer.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
ENTRIES = 4096
END = "<|endoftext|>"
BOOKS = {  # as the program `bible` abbreviates them in its output
    "Ge": "Genesis",
    "Exo": "Exodus",
    "Ruth": "Ruth",
    "Psa": "Psalms",
    "Prv": "Proverbs",
    "Eccl": "Ecclesiastes",
    "Jonah": "Jonah",
    "Mat": "Matthew",
    "Mark": "Mark",
    "Luke": "Luke",
    "John": "John",
}


def text(verses: list[str]) -> str:
    """A line a verse without its number, an empty line between chapters, the name of a book above its first."""
    return "\n".join(_lines(verses)) + "\n"


def _lines(verses: list[str]) -> Iterator[str]:
    last_book = last_chapter = None
    for verse in verses:
        place, words = verse.split(" ", 1)  # Ge1:1 In the beginning ...
        chapter = place.split(":")[0]
        book = BOOKS.get(chapter.rstrip("0123456789"))
        if book is None:
            continue
        if last_chapter not in (None, chapter):
            yield ""
        if book != last_book:
            yield from (book, "")
        last_book, last_chapter = book, chapter
        yield words.strip()


def tokenizer(source: str) -> Tokenizer:
    """Byte-level pair encoding, so that any text can be encoded; the end-of-text token is number 0."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(source.splitlines(keepends=True), trainer)
    return made


if __name__ == "__main__":
    printed = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], stdout=subprocess.PIPE, check=True, text=True).stdout
    made = text(printed.splitlines())
    (HERE / "kjv.txt").write_text(made)
    tokenizer(made).save(str(HERE / "tokenizer.json"), pretty=False)
