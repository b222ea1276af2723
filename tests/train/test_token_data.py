"""Token files: batches do not depend on the layout, invalid files are reported, a model learns the shipped text."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from llmb.errors import ConfigError, LaunchError
from llmb.formats.token_file import HEADER, Header, TokenWriter, read_header
from llmb.runtime.token_data import TokenFile

CPU = torch.device("cpu")
DATA = Path(__file__).parent.parent.parent / "data"


def token_file(path: Path, tokens: list[int], vocab: int = 128, end: int | None = None) -> Path:
    with TokenWriter(path, vocab, end) as file:
        file.add(tokens[:7])
        file.add(tokens[7:])
    return path


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Write 100 tokens, each equal to its index."""
    return token_file(tmp_path / "tokens.bin", list(range(100)))


@pytest.mark.parametrize(("vocab", "width"), [(128, 2), (65_536, 2), (65_537, 4), (200_000, 4)])
def test_token_file_round_trip(tmp_path: Path, vocab: int, width: int) -> None:
    tokens = [0, vocab - 1, 5, vocab // 2, 1]
    path = token_file(tmp_path / "tokens.bin", tokens, vocab, end=1)
    assert read_header(path) == Header(vocab=vocab, tokens=5, end=1)
    assert path.stat().st_size == 64 + 5 * width
    assert TokenFile(path).sequences(0, (1, 5), CPU).tolist() == [tokens]


def test_token_file_format_is_stable(tmp_path: Path) -> None:
    """The bytes are spelled out, so that a change of the format is noticed."""
    path = token_file(tmp_path / "tokens.bin", [1, 2, 258], vocab=300)
    head = b"LLMBTOKS" + b"\1\0\0\0" + b"\2\0\0\0" + b"\x2c\1" + bytes(6) + b"\3" + bytes(7) + b"\xff" * 8 + bytes(24)
    assert path.read_bytes() == head + b"\1\0\2\0\2\1"


def test_sequences_are_consecutive_and_wrap_around(numbered: Path) -> None:
    data = TokenFile(numbered)
    assert data.sequences(0, (2, 9), CPU).tolist() == [list(range(9)), list(range(8, 17))]
    assert data.sequences(12, (1, 9), CPU).tolist() == [[96, 97, 98, 99, 0, 1, 2, 3, 4]]
    epochs = data.sequences(0, (25, 9), CPU)  # 200 labels: each token twice
    assert np.bincount(epochs[:, 1:].flatten()).tolist() == [2] * 100
    assert data.sequences(10**12, (1, 9), CPU)[0, 0] == 8 * 10**12 % 100


def test_batch_does_not_depend_on_micro_batches(numbered: Path) -> None:
    data = TokenFile(numbered)
    whole = data.sequences(30, (12, 6), CPU)
    for size in (1, 2, 3, 4, 6):
        variants = [data.sequences(30 + first, (size, 6), CPU) for first in range(0, 12, size)]
        assert torch.equal(torch.cat(variants), whole)
    assert whole.dtype == torch.int64


def test_failed_writer_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token 128 is outside the vocabulary of 128"):
        token_file(tmp_path / "tokens.bin", [1, 2, 3, 4, 5, 6, 7, 128])
    with pytest.raises(KeyboardInterrupt), TokenWriter(tmp_path / "tokens.bin", vocab=128):
        raise KeyboardInterrupt
    with pytest.raises(LaunchError, match="cannot write"), TokenWriter(tmp_path / "no" / "tokens.bin", vocab=128):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _whole: b"In the beginning", "is not a token file; llmb-run tokenize makes one"),
        (lambda _whole: b"In the beginning " * 10, "is not a token file"),
        (lambda whole: whole[: HEADER.size - 1], "is not a token file"),
        (lambda whole: whole[:8] + b"\7" + whole[9:], "of version 7; this llmb reads version 1"),
        (lambda whole: whole[:12] + b"\4" + whole[13:], "4 bytes per token do not match a vocabulary of 128"),
        (lambda whole: whole[:-5], "is truncated: its header says 100 tokens, 97.5 are there"),
        (lambda whole: whole + b"xx", "has trailing bytes: its header says 100 tokens, 101 are there"),
        (lambda _whole: Header(vocab=128, tokens=0).packed(), "holds no tokens"),
    ],
)
def test_invalid_token_file_is_reported(numbered: Path, damage: Callable[[bytes], bytes], reason: str) -> None:
    numbered.write_bytes(damage(numbered.read_bytes()))
    with pytest.raises(ConfigError, match=reason) as error:
        TokenFile(numbered)
    assert str(numbered) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_token_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read token file {tmp_path / 'none'}: No such file"):
        TokenFile(tmp_path / "none")


def test_token_outside_vocabulary_is_reported(numbered: Path) -> None:
    with numbered.open("r+b") as file:
        file.seek(HEADER.size + 2 * 50)
        file.write(b"\xff\xff")
    data = TokenFile(numbered)
    data.sequences(0, (1, 50), CPU)
    with pytest.raises(ConfigError, match="damaged: token 65535 in a vocabulary of 128"):
        data.sequences(0, (1, 51), CPU)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seqlen": 100}, "has 100 tokens, too few for one sequence of 100 and a label"),
        ({"vocab": 127}, "has a vocabulary of 128, the model one of only 127"),
    ],
)
def test_incompatible_token_file_is_refused(trained, numbered, changes, reason) -> None:
    assert reason in trained(data=str(numbered), **changes).refusal()


def test_loss_depends_on_file_not_on_micro_batches(trained, tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens.bin", [(7 * i * i + 3 * i) % 128 for i in range(3000)])
    at_once = trained(data=str(path), mbs=4, ga=1).losses()
    assert trained(data=str(path), mbs=1, ga=4).losses() == pytest.approx(at_once, rel=1e-5)
    assert trained().losses() != at_once


@pytest.mark.slow
def test_small_model_learns_shipped_text(trained, llmb_run, tmp_path: Path) -> None:
    tokens = tmp_path / "kjv.bin"
    code, _, err = llmb_run("tokenize", DATA / "kjv.txt", "--tokenizer", DATA / "tokenizer.json", "-o", tokens)
    assert code == 0, err
    assert read_header(tokens).vocab == 4096
    losses = trained(
        data=str(tokens), vocab=4096, hidden=64, ffn=128, head_dim=16, seqlen=128, mbs=8, gbs=8, steps=60, lr=1e-2
    ).losses()
    assert losses[0] == pytest.approx(math.log(4096), rel=0.02)
    frequencies = np.bincount(TokenFile(tokens).sequences(0, (60 * 8, 129), CPU).flatten()) / (60 * 8 * 129)
    frequencies_alone = -sum(p * math.log(p) for p in frequencies if p > 0)
    assert sum(losses[-5:]) / 5 < frequencies_alone - 0.2, "it has learned more than token frequencies"
