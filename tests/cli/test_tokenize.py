"""llmb-run tokenize: the same tokens as the library for the whole text, in constant memory; errors in one line."""

import io
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from llmb.cli import tokenize
from llmb.formats.token_file import HEADER, Header, read_header

DATA = Path(__file__).parent.parent.parent / "data"
TOKENIZER = DATA / "tokenizer.json"


def tokens_in(path: Path) -> list[int]:
    return np.fromfile(path, f"<u{read_header(path).token_bytes}", offset=HEADER.size).tolist()


@pytest.fixture
def encode():
    library = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    return lambda text: library.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
def test_shipped_text_is_encoded_as_by_the_library(llmb_run, tmp_path, encode):
    path = tmp_path / "kjv.bin"
    code, out, err = llmb_run("tokenize", DATA / "kjv.txt", "--tokenizer", TOKENIZER, "-o", path)
    assert code == 0, err  # a slow machine shows progress
    text = (DATA / "kjv.txt").read_text()
    assert tokens_in(path) == [*encode(text), 0]
    count = read_header(path).tokens
    expected = (
        f"{path}: {count:,} tokens, {len(text) / count:.2f} bytes of text each; vocabulary 4,096, end-of-text token 0"
    )
    assert out == expected + "\n"
    assert tokenizers.Tokenizer.from_file(str(TOKENIZER)).decode(tokens_in(path)) == text
    assert [p.name for p in tmp_path.iterdir()] == ["kjv.bin"]


def test_each_of_several_texts_ends_with_the_end_token(llmb_run, tmp_path, encode):
    texts = {"a.txt": "In the beginning", "b.txt": "caf\u00e9\r\n\r\n  \u4e16\u754c \U0001f600\n", "c d.txt": " \n"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    path = tmp_path / "tokens.bin"
    code, _, err = llmb_run("tokenize", *(tmp_path / n for n in texts), "--tokenizer", TOKENIZER, "-o", path)
    assert code == 0, err
    assert tokens_in(path) == [token for text in texts.values() for token in (*encode(text), 0)]
    assert read_header(path) == Header(vocab=4096, tokens=len(tokens_in(path)), end=0)


def test_stdin_and_another_end_token(tmp_path, encode):
    path = tmp_path / "tokens.bin"
    command = [
        sys.executable,
        "-m",
        "llmb.cli.llmb_run",
        "tokenize",
        "-",
        "--tokenizer",
        TOKENIZER,
        "-o",
        path,
        "--end",
        "z",
    ]
    done = subprocess.run(command, input="And God said,", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    z = encode("z")
    assert tokens_in(path) == encode("And God said,") + z
    assert read_header(path).end == z[0]


def test_tokenizer_without_an_end_token(llmb_run, tmp_path):
    words = {"one": 0, "two": 1, "?": 70_000}  # numbers with a gap, as in published vocabularies
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("two one three")
    path = tmp_path / "tokens.bin"
    code, out, _ = llmb_run("tokenize", tmp_path / "a.txt", "--tokenizer", tmp_path / "words.json", "-o", path)
    assert code == 0
    assert "vocabulary 70,001, no end-of-text token" in out
    assert read_header(path) == Header(vocab=70_001, tokens=3)
    assert tokens_in(path) == [1, 0, 70_000]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no line end",
        "a\nb\n\n\nc\n \n d\n" * 20_000,
        "\n" * 200_000,
        "word " * 400_000,
        "x" * 2_500_000,
        "\u4e16" * 70_000 + "\n" + "y" * 70_000,
    ],
    ids=["empty", "short", "lines", "newlines", "words", "one word", "wide"],
)
def test_chunks_join_to_the_text_and_end_where_no_token_crosses(text):
    parts = list(tokenize.text_chunks(io.StringIO(text, newline="")))
    assert "".join(parts) == text
    assert all(parts)
    assert max(map(len, parts), default=0) <= tokenize.MAX_CHUNK + tokenize.CHUNK
    for before, after in pairwise(parts):
        at_line = before.endswith("\n") and not before[-2].isspace() and not after[0].isspace()
        assert at_line or len(before) > tokenize.MAX_CHUNK - tokenize.CHUNK


PATTERNS = {  # pre-tokenization of GPT-2 and of Llama 3
    "gpt2": None,
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SCRAPS = ["word", "a", "12", "1234", "...", "it's", " ", "  ", "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", "\n ", "\t"]


@pytest.mark.slow
@pytest.mark.parametrize("cut_at", ["lines", "spaces"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_chunks_give_the_tokens_of_the_whole_text(pattern, cut_at, monkeypatch):
    """Many small chunks of text full of white space, runs of which are among the merges."""
    monkeypatch.setattr(tokenize, "CHUNK", 50)
    monkeypatch.setattr(tokenize, "MAX_CHUNK", 2_000)
    scraps = SCRAPS if cut_at == "lines" else [scrap for scrap in SCRAPS if scrap != "\n"]
    text = "".join(random.Random(1).choices(scraps, k=60_000))
    split = PATTERNS[pattern]
    parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(split), "isolated"), parts]) if split else parts
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    text_chunks = list(tokenize.text_chunks(io.StringIO(text, newline="")))
    assert len(text_chunks) > 50
    ends = [before[-1] == "\n" if cut_at == "lines" else after[0] == " " for before, after in pairwise(text_chunks)]
    assert all(ends), "none was cut where it had to be"
    assert [token for chunk in text_chunks for token in tokenizer.encode(chunk).ids] == tokenizer.encode(text).ids


WRONG = [
    (["missing.txt"], {}, "no file missing.txt; give the path of a text"),
    (["."], {}, ". is a folder"),
    (["empty.txt"], {}, "empty.txt is empty"),
    (["good.txt", "bytes.txt"], {}, "bytes.txt is not UTF-8 text"),
    (["good.txt"], {"--tokenizer": "missing.json"}, "no tokenizer file missing.json"),
    (["good.txt"], {"--tokenizer": "good.txt"}, "good.txt is not a tokenizer file"),
    (["good.txt"], {"--end": "<nothing>"}, "no token '<nothing>'; usual ones it has: ['<|endoftext|>']"),
    (["good.txt"], {"-o": "good.txt"}, "good.txt exists and is not a token file"),
    (["good.txt"], {"-o": "no/tokens.bin"}, "cannot write no/tokens.bin"),
    ([], {}, "the following arguments are required: TEXT"),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "changes", "message"), WRONG, ids=range(len(WRONG)))
def test_invalid_request_is_one_line_and_leaves_no_file(llmb_run, tmp_path, monkeypatch, texts, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text("good\n")
    Path("empty.txt").write_text("")
    Path("bytes.txt").write_bytes(b"\xff\xfe\x00")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    options = {"--tokenizer": str(TOKENIZER), "-o": "tokens.bin", **changes}
    code, _, err = llmb_run("tokenize", *texts, *(word for pair in options.items() for word in pair))
    assert code == (2 if "cannot write" in message else 1)
    assert message in err
    assert err.count("\n") == 1
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


# VmHWM is this program's own peak; getrusage's also holds that of the process which started it.
PEAK = """
import re, sys
from llmb.cli.llmb_run import main
code = main(["tokenize", sys.argv[1], "--tokenizer", sys.argv[2], "-o", sys.argv[3]])
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_text(tmp_path):
    text, peaks = (DATA / "kjv.txt").read_text(), []
    for repeats in (6, 60):
        (tmp_path / "text").write_text(text * repeats)
        command = [sys.executable, "-c", PEAK, tmp_path / "text", TOKENIZER, tmp_path / "tokens.bin"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stderr.splitlines()[-1]))
    more_text = 54 * len(text)  # 62 MB; the library's threads make the peak vary by some 10 MB
    assert peaks[1] - peaks[0] < more_text / 4, f"{peaks}: {more_text} bytes more text"
