"""`llmb-run tokenize`: encode text into a token file, with any tokenizer file of the library `tokenizers`.

Text is read in chunks, so memory does not grow with it. A chunk ends with a line, where tokenizers of language models
split anyway; a million characters without a line end are cut before a space.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from llmb.cli.subcommand import command

CHUNK = 1 << 16  # characters read at once; also about the size of a chunk
MAX_CHUNK = 1 << 20  # characters to wait for a line end
BATCH = 32  # chunks that the library encodes at once, on all cores
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # looked for in this order where --end is not given


def add_commands(commands: Any) -> None:
    """Register tokenize."""
    parser = command(
        commands, "tokenize", run, "make a token file from text, to train on",
        "llmb-run tokenize data/kjv.txt --tokenizer data/tokenizer.json -o kjv.bin",
        "zcat corpus/*.gz | llmb-run tokenize - --tokenizer tokenizer.json -o corpus.bin",
        "llmb-run submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy --set data=kjv.bin",
    )  # fmt: skip
    add = parser.add_argument
    add("texts", nargs="+", metavar="TEXT", help="UTF-8 text files; - is standard input")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the token file to write")
    add("--tokenizer", type=Path, required=True, metavar="FILE", help="a tokenizer.json in Hugging Face's format")
    add(
        "--end",
        metavar="TOKEN",
        help=f"put after each text; default: the first the tokenizer has of {' '.join(END_TOKENS)}",
    )


def run(options: argparse.Namespace) -> int:
    """Encode every text in turn, with an end-of-text token after each."""
    from llmb.formats.token_file import TokenWriter

    _check_paths(options.texts, options.output)
    tokenizer = _load_tokenizer(options.tokenizer)
    vocab = max(tokenizer.get_vocab().values()) + 1
    end = _end_token(tokenizer, options.end)
    with Progress(options.texts) as progress, TokenWriter(options.output, vocab, end) as file:
        for name in options.texts:
            before = file.header.tokens
            for batch in _batches(name):
                for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                    file.add(encoding.ids)
                progress.add(sum(len(chunk.encode()) for chunk in batch))
            _refuse_empty(name, file.header.tokens - before)
            if end is not None:
                file.add([end])
    marks = "no end-of-text token" if end is None else f"end-of-text token {end}"
    size = f"{file.header.tokens:,} tokens, {progress.done / file.header.tokens:.2f} bytes of text each"
    print(f"{options.output}: {size}; vocabulary {vocab:,}, {marks}")
    return 0


def text_chunks(file: TextIO) -> Iterator[str]:
    """Yield the text of a file in chunks that can be encoded independently."""
    buffer = ""
    while read := file.read(CHUNK):
        buffer += read
        cut = _cut_position(buffer)
        if cut:
            yield buffer[:cut]
            buffer = buffer[cut:]
    if buffer:
        yield buffer


def _cut_position(text: str) -> int:
    """Return where to cut a text, or 0 if more must be read."""
    newline = _last_isolated(text, "\n")
    if newline > 0 or len(text) < MAX_CHUNK:
        return newline + 1
    space = _last_isolated(text, " ")
    return space if space > 0 else len(text)


def _last_isolated(text: str, character: str) -> int:
    """Return the last index of a character without white space on either side, or -1.

    Beside other white space a cut is not safe: tokenizers treat a run of it differently at the end of a text.
    """
    index = text.rfind(character, 1, -1)
    while index >= 0 and (text[index - 1].isspace() or text[index + 1].isspace()):
        index = text.rfind(character, 1, index)
    return index


def _batches(name: str) -> Iterator[list[str]]:
    """Yield lists of chunks of one text; refuse what is not text."""
    from llmb.errors import ConfigError

    batch: list[str] = []
    try:
        with open(0 if name == "-" else name, encoding="utf-8", newline="", closefd=name != "-") as file:
            for chunk in text_chunks(file):
                batch.append(chunk)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error.reason}") from error
    if batch:
        yield batch


def _check_paths(texts: list[str], output: Path) -> None:
    """Check all paths before the first file is read."""
    from llmb.errors import ConfigError
    from llmb.formats.token_file import is_token_file

    for name in texts:
        if name != "-" and not Path(name).exists():
            raise ConfigError(f"no file {name}; give the path of a text, or - for standard input")
        if Path(name).is_dir():
            raise ConfigError(f"{name} is a folder; give its text files: {name}/*.txt")
    if output.exists() and not is_token_file(output):
        raise ConfigError(f"{output} exists and is not a token file; choose another name")


def _load_tokenizer(path: Path) -> Any:
    from llmb.errors import ConfigError
    from llmb.formats.tokenizer_file import read_tokenizer

    if not path.is_file():
        raise ConfigError(f"no tokenizer file {path}; a model's folder has it as tokenizer.json")
    return read_tokenizer(path)


def _end_token(tokenizer: Any, requested: str | None) -> int | None:
    from llmb.errors import ConfigError

    if requested is not None and tokenizer.token_to_id(requested) is None:
        available = [token for token in END_TOKENS if tokenizer.token_to_id(token) is not None]
        raise ConfigError(f"--end: the tokenizer has no token {requested!r}; usual ones it has: {available or 'none'}")
    candidates = [tokenizer.token_to_id(token) for token in ((requested,) if requested else END_TOKENS)]
    return next((number for number in candidates if number is not None), None)


def _refuse_empty(name: str, tokens: int) -> None:
    from llmb.errors import ConfigError

    if tokens == 0:
        raise ConfigError(f"{'standard input' if name == '-' else name} is empty: there is nothing to encode")


class Progress:
    """Progress of long work on stderr; silent for short work."""

    def __init__(self, texts: list[str]):
        from llmb.report.status_line import StatusLine

        self.done = 0  # bytes of text
        self._total = None if "-" in texts else sum(os.path.getsize(name) for name in texts)
        self._began = time.monotonic()
        self._next = self._began + 1
        self._line = StatusLine()

    def add(self, done: int) -> None:
        """Advance by a number of bytes."""
        self.done += done
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 0.2
        share = f" of {self._total / 1e6:,.0f} MB ({self.done / self._total:.0%})" if self._total else " MB"
        self._line.draw(f"{self.done / 1e6:,.0f}{share}, {self.done / 1e6 / (now - self._began):.1f} MB/s")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
